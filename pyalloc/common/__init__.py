"""What every room uses: sizes, files, terminals, settings.  Knows neither traces nor torch."""
