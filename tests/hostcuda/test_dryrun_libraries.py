"""pyalloc dryrun: libraries whose next step is a number from the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyalloc.outside import hostcuda

from .dryrun_support import end_well, finish, program, start


def test_detectors_choose_as_many_boxes_as_they_sample(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Before, they took all proposals, ten times the memory; detection of many classes looked at each box by itself."""
    pytest.importorskip("torchvision", reason="needs torchvision: pip install torchvision")
    source = """
        import torch
        from torchvision.models.detection import KeypointRCNN, MaskRCNN
        from torchvision.models.detection.rpn import AnchorGenerator
        sizes = dict(min_size=128, max_size=128, box_batch_size_per_image=64, rpn_pre_nms_top_n_train=500)
        n = {}
        def see(name):
            return lambda _module, inputs, _output: n.update({name: len(inputs[0])})
        def target():
            boxes = torch.tensor([[4.0, 4, 60, 60], [10, 20, 90, 90]])
            return {
                "boxes": boxes.cuda(), "labels": torch.tensor([1, 2]).cuda(),
                "masks": torch.ones(2, 128, 128, dtype=torch.uint8).cuda(), "keypoints": torch.ones(2, 17, 3).cuda(),
            }
        for kind, head in ((MaskRCNN, "mask_head"), (KeypointRCNN, "keypoint_head")):
            backbone = torch.nn.Conv2d(3, 16, 4, stride=4)
            backbone.out_channels = 16
            anchors = AnchorGenerator(((32,),), ((0.5, 1.0, 2.0),))
            detector = kind(backbone, 91, rpn_anchor_generator=anchors, **sizes).cuda()
            detector.roi_heads.box_head.register_forward_hook(see("boxes"))
            getattr(detector.roi_heads, head).register_forward_hook(see("masks"))
            images = [torch.rand(3, 128, 128).cuda() for _ in range(2)]
            sum(detector(images, [target(), target()]).values()).backward()
            assert n == {"boxes": 128, "masks": 32}, n
            detector.eval()
            with torch.no_grad():
                found = detector(images)
            assert n == {"boxes": 2000, "masks": 200}, n
            assert [len(each["boxes"]) for each in found] == [100, 100]
        detector.cpu().train()
        truth = {name: each.cpu() for name, each in target().items()}
        losses = detector([torch.rand(3, 128, 128)], [truth])
        assert all(torch.isfinite(each) for each in losses.values())
    """
    end_well(tmp_path, source)


def test_what_is_answered_can_be_compiled_by_torch_jit(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """It compiles the source that it finds: the library's, not ours."""
    pytest.importorskip("torchvision", reason="needs torchvision: pip install torchvision")
    source = """
        import torch
        from torch.nn.utils.rnn import pack_padded_sequence
        from torchvision.models.detection import KeypointRCNN
        from torchvision.models.detection.rpn import AnchorGenerator
        backbone = torch.nn.Conv2d(3, 16, 4, stride=4)
        backbone.out_channels = 16
        anchors = AnchorGenerator(((32,),), ((0.5, 1.0, 2.0),))
        torch.jit.script(KeypointRCNN(backbone, 2, rpn_anchor_generator=anchors))
        class Recurrent(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.gru = torch.nn.GRU(20, 16, batch_first=True)
            def forward(self, x, lengths):
                packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                return self.gru(packed)[0].data
        recurrent = torch.jit.script(Recurrent().cuda())
        assert recurrent(torch.randn(2, 9, 20).cuda(), torch.tensor([4, 9])).shape == (13, 16)
    """
    end_well(tmp_path, source)


def test_assistants_draft_at_every_length(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """The number of their correct tokens is counted on the device: none was added, and generate() never ended."""
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    source = """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel
        def model(n_layer):
            sizes = dict(vocab_size=64, n_positions=64, n_embd=32, n_head=2, pad_token_id=0, eos_token_id=5)
            return GPT2LMHeadModel(GPT2Config(n_layer=n_layer, **sizes)).cuda().eval()
        target, assistant = model(2), model(1)
        prompt = torch.ones(1, 8, dtype=torch.int64).cuda()
        passes = []
        def see(*_):
            passes.append(1)
            assert len(passes) < 20
        target.register_forward_hook(see)
        for drafts in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 2}):
            for is_random in (False, True):
                passes.clear()
                torch.set_default_device("cuda" if is_random else None)
                made = target.generate(prompt, max_new_tokens=4, do_sample=is_random, **drafts)
                print(*made.shape, len(passes))
    """
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0, err
    assert out.splitlines() == ["1 12 4"] * 4, out


def test_completions_of_trl_have_their_largest_length(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """They were cut at an end that the device had found in no token, and the trainers looked at the last one."""
    source = """
        from trl.trainer import grpo_trainer, rloo_trainer
        for module, kind in ((grpo_trainer, "GRPOTrainer"), (rloo_trainer, "RLOOTrainer")):
            trainer = getattr(module, kind)()
            trainer.max_completion_length = 3
            print(trainer._generate_single_turn([[1], [2]]))
    """
    folder = tmp_path / "trl" / "trainer"
    folder.mkdir(parents=True)
    for name, kind, made in (("grpo", "GRPO", "[[], [7]], None"), ("rloo", "RLOO", "[[], []]")):
        text = f"class {kind}Trainer:\n    def _generate_single_turn(self, prompts):\n        return {made}\n"
        (folder / f"{name}_trainer.py").write_text(text)
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert (code, out) == (0, "([[0, 0, 0], [7]], None)\n[[0, 0, 0], [0, 0, 0]]\n"), err


def test_graphs_are_padded_to_the_largest(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """It was counted on the device: dense batches held no nodes, dense adjacency matrices raised."""
    source = """
        import torch
        from torch_geometric.utils import to_dense_batch
        batch, x = torch.tensor([0, 0, 1, 1, 1, 2]), torch.randn(6, 4)
        for each in (batch.cuda(), torch.randn(6, device="cuda").long(), batch):
            print(to_dense_batch(x, each), to_dense_batch(x, batch=each, max_num_nodes=2))
        print(to_dense_batch(x))
    """
    folder = tmp_path / "torch_geometric" / "utils"
    folder.mkdir(parents=True)
    for name in ("batch", "adj"):
        text = (
            f"import torch\ndef to_dense_{name}(x, batch=None, max_num_nodes=None):\n"
            "    return max_num_nodes\n"
        )
        (folder / f"_to_dense_{name}.py").write_text(text)
    (folder / "__init__.py").write_text("from ._to_dense_batch import to_dense_batch\n")
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert (code, out) == (0, "3 2\n6 2\nNone 2\nNone\n"), err


def test_metrics_and_padded_encoders_find_their_arguments_valid(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """There were as many classes as labels, and sequences without a last token were all empty."""
    source = """
        import torch
        mask = torch.zeros(4, 10, dtype=torch.bool)
        mask[:, 7:] = True
        layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 1).cuda().eval()
        x = torch.randn(4, 10, 64, device="cuda")
        with torch.no_grad():
            assert encoder(x, src_key_padding_mask=mask.cuda()).shape == (4, 10, 64)
        try:
            from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
        except ImportError:
            raise SystemExit(print("none"))
        labels, scores = torch.randint(0, 5, (64,)), torch.randn(64, 5).softmax(-1)
        for metric in (MulticlassAccuracy(5), MulticlassAUROC(5)):
            metric.cuda().update(scores.cuda(), (labels.cuda() + 0))
        try:
            MulticlassAccuracy(5).update(scores, labels + 7)
        except RuntimeError as error:
            print("on the host:", type(error).__name__)
    """
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0, err
    assert out in ("none\n", "on the host: RuntimeError\n"), out
