"""How many boxes torchvision's detectors choose: few out of very many, so the maximum would say nothing.

Training samples a fixed number.  Detection keeps what scores well: here one class of each proposal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyalloc._bootstrap import sizes
from pyalloc._bootstrap.importing import after_import
from pyalloc._bootstrap.replacing import standing_for


def answer() -> None:
    """Answers as soon as the detectors are imported."""
    after_import("torchvision.models.detection._utils", _matches)
    after_import("torchvision.models.detection.rpn", _proposals)
    after_import("torchvision.models.detection.roi_heads", _regions)


def _expecting(kind: Any, name: str, expect: Callable[..., dict[int, int]]) -> None:
    """Wraps the method: of masks with so many elements, expect() says how many it will find to be true."""
    method = getattr(kind, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with sizes.expecting(expect(*args)):
            return method(*args, **kwargs)

    setattr(kind, name, standing_for(method, call))


def _n_positive(sampler: Any) -> int:
    return int(sampler.batch_size_per_image * sampler.positive_fraction)


def _matches(utils: Any) -> None:
    """Matcher finds one anchor for each box."""
    _expecting(
        utils.Matcher,
        "set_low_quality_matches_",
        lambda _matcher, _matches, _all_matches, quality: {quality.numel(): quality.shape[0]},
    )


def _proposals(rpn: Any) -> None:
    def expect(network: Any, _objectness: Any, _deltas: Any, labels: Any, _targets: Any) -> Any:
        found = _n_positive(network.fg_bg_sampler)
        return {sum(len(each) for each in labels): found * len(labels)}

    _expecting(rpn.RegionProposalNetwork, "compute_loss", expect)


def _regions(roi_heads: Any) -> None:
    heads = roi_heads.RoIHeads
    sample, to_keypoints = heads.subsample, roi_heads.heatmaps_to_keypoints

    def subsample(self: Any, labels: Any) -> Any:
        """Full samples, each with as many positive boxes as the sampler allows."""
        if not all(each.is_cuda for each in labels):
            return sample(self, labels)
        n = [min(self.fg_bg_sampler.batch_size_per_image, len(each)) for each in labels]
        most = [min(_n_positive(self.fg_bg_sampler), each) for each in n]
        sizes.expected().update(zip(n, most, strict=True))
        sizes.expected().setdefault(sum(n), sum(most))
        return [
            each.new_empty(size, dtype=roi_heads.torch.int64)
            for each, size in zip(labels, n, strict=True)
        ]

    def score(_heads: Any, logits: Any, _boxes: Any, proposals: Any, _shapes: Any) -> Any:
        n_classes = logits.shape[-1] - 1  # without the background
        return {len(each) * n_classes: len(each) for each in proposals}

    def heatmaps_to_keypoints(maps: Any, rois: Any) -> Any:
        """Skips resizing each map to its box: only the device knows the size of the box."""
        if not maps.is_cuda:
            return to_keypoints(maps, rois)
        return maps.new_empty((len(rois), maps.shape[1], 3)), maps.new_empty(maps.shape[:2])

    heads.subsample = standing_for(sample, subsample)
    _expecting(heads, "forward", lambda *_args: {})
    _expecting(heads, "postprocess_detections", score)
    roi_heads.heatmaps_to_keypoints = standing_for(to_keypoints, heatmaps_to_keypoints)
