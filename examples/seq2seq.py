"""A sequence-to-sequence model with attention; its memory, phase by phase.

Bidirectional GRU encoder, additive attention, GRU decoder with teacher forcing,
Adam.  It knows nothing of allocators: it prints what torch.cuda says of
whichever is active.

    python examples/seq2seq.py                  on a GPU, torch's own allocator
    pyalloc run python examples/seq2seq.py      on a GPU, pyalloc
    pyalloc dryrun python examples/seq2seq.py   without a GPU: allocations are
                                                real, kernels compute nothing

cuDNN is off unless --cudnn is given: without a GPU there is no cuDNN to say how
much workspace its GRU wants, and with it off torch uses its own GRU, whose
memory is the same in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

MIB = 2**20
PAD = 0


class Encoder(nn.Module):
    """Tokens (B, S) to one vector of `hidden` numbers per token (B, S, hidden), half of them from each direction."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=PAD)
        self.gru = nn.GRU(embedding, hidden // 2, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors, and the last state of both directions (B, hidden)."""
        vectors, last = self.gru(self.embedding(tokens))
        return vectors, torch.cat((last[0], last[1]), dim=1)


class AdditiveAttention(nn.Module):
    """score = v . tanh(W_k k + W_q q), softmax over the source, sum of the vectors (Bahdanau 2014)."""

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.key = nn.Linear(hidden, size, bias=False)
        self.query = nn.Linear(hidden, size, bias=False)
        self.score = nn.Linear(size, 1, bias=False)

    def forward(self, state: Tensor, keys: Tensor, values: Tensor, is_padding: Tensor) -> Tensor:
        """From state (B, H), keys (B, S, size), values (B, S, H), is_padding (B, S) to the context (B, H)."""
        scores = self.score(torch.tanh(keys + self.query(state).unsqueeze(1))).squeeze(2)
        weights = torch.softmax(scores.masked_fill(is_padding, float("-inf")), dim=1)
        return torch.bmm(weights.unsqueeze(1), values).squeeze(1)

    def sequence(self, keys: Tensor, values: Tensor) -> AbstractContextManager[None]:
        """What the decoder's loop over one sequence runs in."""
        return nullcontext()


class FusedAttention(AdditiveAttention):
    """The same by pyalloc.ops: a step keeps its query and its weights, not tanh of every key."""

    def forward(self, state: Tensor, keys: Tensor, values: Tensor, is_padding: Tensor) -> Tensor:
        """As AdditiveAttention."""
        from pyalloc.ops import additive_attention

        context = additive_attention(
            self.query(state), keys, values, self.score.weight.squeeze(0), ~is_padding
        )
        assert isinstance(context, Tensor)
        return context

    def sequence(self, keys: Tensor, values: Tensor) -> AbstractContextManager[None]:
        """Within it the steps' gradients of keys and values gather in one place."""
        from pyalloc.ops import sequence_gradients

        return sequence_gradients(keys, values)


class Decoder(nn.Module):
    """One GRU step per target token, each looking at the source through the attention."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, attention: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=PAD)
        self.attention = attention
        self.cell = nn.GRUCell(embedding + hidden, hidden)
        self.start = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor, values: Tensor, last: Tensor, is_padding: Tensor) -> Tensor:
        """From tokens (B, T), the target shifted right, to logits (B, T, vocabulary)."""
        state = torch.tanh(self.start(last))
        keys = self.attention.key(values)
        states = []
        with self.attention.sequence(keys, values):
            for embedded in self.embedding(tokens).unbind(1):
                context = self.attention(state, keys, values, is_padding)
                state = self.cell(torch.cat((embedded, context), dim=1), state)
                states.append(state)
        return self.output(torch.stack(states, dim=1))


class Seq2Seq(nn.Module):
    """Source (B, S) and shifted target (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, attention: nn.Module) -> None:
        super().__init__()
        self.encoder = Encoder(vocabulary, embedding, hidden)
        self.decoder = Decoder(vocabulary, embedding, hidden, attention)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the next token at each place of the target."""
        values, last = self.encoder(source)
        return self.decoder(target, values, last, source == PAD)


class Table:
    """Allocated, peak and reserved MiB after each phase, printed as they come and kept for --json."""

    def __init__(self) -> None:
        self.rows: list[dict[str, int | str]] = []
        self.peak_allocated = 0
        self.peak_reserved = 0
        print(f"{'step':>4}  {'phase':<10}{'allocated':>10}{'peak':>8}{'reserved':>10}  MiB")

    def add(self, step: int, phase: str) -> None:
        """Reads torch's statistics; the peak is the highest of the step so far."""
        torch.cuda.synchronize()
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        reserved, peak_reserved = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
        self.peak_allocated = max(self.peak_allocated, peak)
        self.peak_reserved = max(self.peak_reserved, peak_reserved)
        self.rows.append(
            {
                "step": step,
                "phase": phase,
                "allocated_bytes": allocated,
                "peak_bytes": peak,
                "reserved_bytes": reserved,
            }
        )
        print(
            f"{step:>4}  {phase:<10}{allocated / MIB:>10.0f}{peak / MIB:>8.0f}{reserved / MIB:>10.0f}"
        )


def arguments() -> argparse.Namespace:
    """Sizes default to those of the forum thread this model comes from."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--batch", type=int, default=80)
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=1000)
    parser.add_argument("--embedding", type=int, default=500)
    parser.add_argument("--attention", type=int, default=1000)
    parser.add_argument("--vocabulary", type=int, default=30_000)
    parser.add_argument(
        "--cudnn", action="store_true", help="let cuDNN run the encoder (needs a GPU)"
    )
    parser.add_argument("--fused", action="store_true", help="attention by pyalloc.ops")
    parser.add_argument("--json", type=Path, help="write the table and the peaks to this file")
    return parser.parse_args()


def random_batch(args: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B, length) for source and target, made on the CPU so that they do not depend on the device."""
    shape = (2, args.batch, args.length)
    source, target = torch.randint(PAD + 1, args.vocabulary, shape, generator=generator)
    return source, target


def train(args: argparse.Namespace) -> Table:
    """Trains on random tokens; memory does not depend on what they are."""
    torch.backends.cudnn.enabled = args.cudnn
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    attention = (FusedAttention if args.fused else AdditiveAttention)(args.hidden, args.attention)
    model = Seq2Seq(args.vocabulary, args.embedding, args.hidden, attention).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    criterion: Callable[[Tensor, Tensor], Tensor] = nn.CrossEntropyLoss(ignore_index=PAD)
    table = Table()
    for step in range(args.steps):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        source, target = (
            tokens.cuda(non_blocking=True) for tokens in random_batch(args, generator)
        )
        table.add(step, "start")
        logits = model(source, target)
        table.add(step, "forward")
        loss = criterion(logits.flatten(0, 1), target.flatten())
        table.add(step, "loss")
        loss.backward()
        table.add(step, "backward")
        optimizer.step()
        table.add(step, "optimizer")
    return table


def main() -> None:
    """Trains and, with --json, writes what was measured."""
    args = arguments()
    table = train(args)
    print(
        f"peak allocated {table.peak_allocated / MIB:.0f} MiB, peak reserved {table.peak_reserved / MIB:.0f} MiB"
    )
    if args.json is not None:
        stats = torch.cuda.memory_stats()
        result = {
            "steps": args.steps,
            "peak_allocated_bytes": table.peak_allocated,
            "peak_reserved_bytes": table.peak_reserved,
            "device_calls": stats["num_device_alloc"] + stats["num_device_free"],
            "rows": table.rows,
        }
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
