"""Reports: an analysis in, text or a page out."""
