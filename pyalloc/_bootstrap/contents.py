"""What lies on a device in a dry run, read and written where it is: no copy of the program's, so none is counted."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
import zlib
from dataclasses import dataclass
from typing import Any

# So much of a block begins with zeros (zeros.c); beyond lies what lay there before.
MOST_BYTES = 2**24
# Operators: of what follows from a guess by more nothing is known, so that loops that wait for it end.
MOST_DEPTH = 2**12
# Bytes of fractions: what masks are made by, not pictures or parameters; what is added up and sorted, scores and noise.
MOST_FRACTIONS, FEW_FRACTIONS = 2**22, 2**20
FEW_NUMBERS = 2**12  # lengths, shares: one for each sample or graph
MOST_ASKED = 1000  # of one thing: a loop that waits for kernels nobody tells of ends
# In place of a count of changes: graphs change it; something did that was not followed.
_REPEATED, _LOST = -1, -2
_PAGE = mmap.PAGESIZE  # of the kernel, which has 64 KiB on some arm64 machines
_host = ctypes.CDLL(None)


@dataclass
class _Note:
    """What is known of a storage.

    n_bytes: of the storage, which resize_() changes and counts no change.
    version: torch's count of its changes in place, up to which all were followed; below 0 where it is of no use.
    n_empty: the first of these, which changed nothing.
    has_zeros: its zeros are as they should be; what no kernel computed reads as zeros, too.
    is_blank: the program asked for zeros to fill them in, and kernels that nobody tells of may have.
    depth: by so many operators it follows from places that were spread evenly; 0: it is no guess.
    share: so much of it is true, which of it nobody knows.
    n_asked: so often was it asked of such zeros whether all is true.
    n_filled: bytes from its start on that were filled in, one part after the other, up to so many changes.
    checksum: as it was brought to the host from where what lies there had been changed by what nobody followed; what
        writes there by way of numpy() counts no change.
    """

    n_bytes: int
    version: int = 0
    n_empty: int = 0
    has_zeros: bool = False
    is_blank: bool = False
    depth: int = 0
    share: float | None = None
    n_asked: int = 0
    n_filled: tuple[int, int] = (0, 0)
    checksum: int | None = None


@dataclass
class Reads:
    """Copies to the host of what a card would have had there, too."""

    known_copies: int = 0


reads = Reads()
changes_are_followed = True  # those in place; older torch leaves no way to
_notes: dict[int, _Note] = {}  # of storages, which take theirs with them


def is_plain(torch: Any, x: Any) -> bool:
    """Not one that only stands for others, as fake tensors do: those lie nowhere."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    is_wrapped = is_wrapped or torch._is_functional_tensor(x)
    return not is_wrapped and type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def on_host(torch: Any, x: Any, most_bytes: int = MOST_BYTES) -> Any:
    """The same memory as a tensor of the host; None where there is nothing or too much of it."""
    if x.numel() == 0 or not is_plain(torch, x) or x.data_ptr() == 0:
        return None
    reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    n_bytes = reach * x.element_size()
    if max(n_bytes, x.nbytes) > most_bytes:  # expanded ones reach less far than they are large
        return None
    there = (ctypes.c_char * n_bytes).from_address(x.data_ptr())
    return torch.frombuffer(there, dtype=x.dtype).as_strided(x.shape, x.stride())


def read(torch: Any, x: Any) -> Any:
    """All of it on the host, whatever it is and however much; the device is waited for, as operators that read do."""
    if not x.is_cuda:
        return x
    torch.cuda.current_stream(x.device).synchronize()
    there = on_host(torch, x, sys.maxsize)
    return torch.empty(x.shape, dtype=x.dtype) if there is None else there.clone()


def _is_untouched(x: Any) -> bool:
    """Nobody has written there, and whoever looks makes pages of it."""
    start = x.data_ptr() & -_PAGE
    end = x.data_ptr() + (x.nbytes if x.is_contiguous() else 1)
    seen = (ctypes.c_ubyte * -((start - end) // _PAGE))()
    asked = _host.mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), seen)
    return bool(asked == 0 and not bytes(seen).strip(b"\0"))


def is_repeated(torch: Any) -> bool:
    """What is done now will be again, with other numbers: a graph is captured."""
    return bool(torch.cuda.is_current_stream_capturing())


def there(torch: Any, x: Any) -> Any:
    """Not a copy of it; None where nothing can be told by it, but zeros where no kernel computed anything else."""
    if x.nbytes > MOST_BYTES or is_repeated(torch):
        return None
    found = on_host(torch, x)
    if found is None or _is_sure(x):
        return found
    if x.nbytes > _PAGE and not is_known(x) and _is_untouched(x):
        return None
    is_none = x.dtype == torch.bool and int(found.view(torch.uint8).max()) > 1
    return None if is_none else found


def told(torch: Any, x: Any) -> Any:
    """A copy on the host of what the program put there or what follows from it, changed in place or not.

    None where it is zeros that a kernel may have computed, or was changed by what could not be followed.
    """
    note = _note(x)
    is_lost = note is not None and note.version < 0
    found = None if is_lost or not (changes_are_followed or is_current(x)) else _told(torch, x)
    return None if found is None else found.clone()


def put(torch: Any, x: Any, takes_floats: bool = False) -> Any:
    """What the program put there or what follows from it, unless something changed it in place that nobody followed.

    None otherwise, and of fractions unless they are asked for.  Not a copy.  Loops that count down in such a tensor
    would never end by what was there before.
    """
    if not x.is_cuda:
        return None if _is_brought_back(torch, x) else x
    is_whole = not (x.is_floating_point() or x.is_complex())
    if not (is_whole or takes_floats) or not is_current(x):
        return None
    return _told(torch, x)


def blank(torch: Any, x: Any) -> Any:
    """Zeros that the program asked for, if nothing tells that they have been filled in; None otherwise."""
    note = _note(x)
    return on_host(torch, x) if note is not None and note.is_blank and is_current(x) else None


def is_open(torch: Any, x: Any) -> bool:
    """Is it of a mask of which nobody knows what it chooses?"""
    return x.dtype == torch.bool and told(torch, x) is None and blank(torch, x) is None


def is_still_false(x: Any) -> bool:
    """As blank() has it, but not forever: a loop may wait for kernels that nobody tells of."""
    note = _note(x)
    if note is None or not note.is_blank or not is_current(x):
        return False
    note.n_asked += 1
    return note.n_asked <= MOST_ASKED


def operands(
    torch: Any, args: Any, takes_floats: bool, knows_other: bool = False, takes_blank: bool = True
) -> Any:
    """All of them on the host; None where one is not known.

    takes_blank: zeros that the program asked for to fill them in are as they were beside others that are known.
    """
    kinds = {"known": knows_other, "blank": False}
    found = []
    for each in args:
        found.append(_operand(torch, each, takes_floats, kinds))
        if found[-1] is NotImplemented:
            return None
    is_sure = not kinds["blank"] or (kinds["known"] and takes_blank)
    return found if is_sure else None


def _operand(torch: Any, each: Any, takes_floats: bool, kinds: dict[str, bool]) -> Any:
    """NotImplemented where it is not known; of which kinds there are is noted."""
    if isinstance(each, (list, tuple)):
        parts = [_operand(torch, part, takes_floats, kinds) for part in each]
        return NotImplemented if any(part is NotImplemented for part in parts) else parts
    if not torch.is_tensor(each):
        return each
    if not is_plain(torch, each):
        return NotImplemented
    if each.numel() == 0 and each.layout is torch.strided and not each.is_nested:
        return torch.empty(each.shape, dtype=each.dtype, device="cpu")
    found = put(torch, each, takes_floats)
    if found is not None:
        kinds["known"] |= each.is_cuda
        return found
    is_whole = not (each.is_floating_point() or each.is_complex())
    found = blank(torch, each) if is_whole or takes_floats else None
    kinds["blank"] |= found is not None
    return NotImplemented if found is None else found


def is_known(x: Any) -> bool:
    """Where it is zeros, unless something has changed it in place since."""
    note = _note(x)
    return note is not None and note.has_zeros


def is_noted(x: Any) -> bool:
    """Something is known of its storage, or was."""
    return _note(x) is not None


def is_current(x: Any) -> bool:
    """Nothing has changed it in place but what was followed; views that operators make have no count of their own."""
    if x.is_inference():
        return False
    note = _note(x)
    last = 0 if note is None else note.version
    return last >= 0 and x._version in (0, last)


def depth(torch: Any, args: Any) -> int:
    """Of what follows from these."""
    deepest = _deepest(torch, args)
    return deepest + (deepest > 0)


def _deepest(torch: Any, args: Any) -> int:
    deepest = 0
    for each in args:
        if isinstance(each, (list, tuple)):
            deepest = max(deepest, _deepest(torch, each))
        elif torch.is_tensor(each) and each.is_cuda:
            note = _note(each)
            deepest = max(deepest, 0 if note is None else note.depth)
    return deepest


def _told(torch: Any, x: Any) -> Any:
    """What lies there, unless it is zeros that a kernel may have computed."""
    found = there(torch, x)
    return found if found is None or _is_sure(x) or found.any() else None


def _is_sure(x: Any) -> bool:
    """Zeros or not: large masks are filled in one sample at a time, and not looked through each time."""
    return is_known(x) and is_current(x)


def _note(x: Any) -> _Note | None:
    """None where nothing was noted: then no Python object is made for its storage.

    It would hold the storage from torch 2.10 on, so that gradients are added up in new memory and not in place.
    """
    import torch

    note = _notes.get(torch._C._storage_address(x))
    if note is not None and note.n_bytes != x.untyped_storage().nbytes():
        _lose(note)
    return note


def is_gradient(torch: Any, x: Any) -> bool:
    """Fractions that a backward formula of torch's own has just made: nobody asks what they are.

    Not what a program finds as .grad: it changes that, too, and graphs add to it.
    """
    node = torch._C._current_autograd_node()
    if node is None or not (x.is_floating_point() or x.is_complex()):
        return False
    if node.name().endswith("AccumulateGrad"):
        return False
    caller: Any = sys._getframe(1)
    while caller is not None and caller.f_globals.get("__package__") == __package__:
        caller = caller.f_back
    # Python that the engine runs, as a checkpoint that computes again, stands between.
    is_formula = caller is None or caller.f_code.co_name == "_engine_run_backward"
    return is_formula and _note(x) is None


def _noted(x: Any) -> _Note:
    storage = x.untyped_storage()
    place = storage._cdata
    if place not in _notes:
        _notes[place] = _Note(storage.nbytes())
        weakref.finalize(storage, _notes.pop, place, None)
    return _notes[place]


def note_brought(torch: Any, x: Any, on_host: Any) -> None:
    """From the device to the host: zeros that nobody computed are no more known once they are brought back.

    Offloaded activations are, masks among them, and what they chose is looked up again in backward.  Of masks that
    nobody knows all is chosen there, too: programs keep points on the host beside their scores on the device.
    """
    if on_host.numel() == 0 or not (_is_strided(torch, on_host) and is_plain(torch, x)):
        return
    is_told = put(torch, x, True) is not None
    if is_told and depth(torch, (x,)) == 0:
        reads.known_copies += 1
    if on_host.numel() == 1 or not (on_host.is_floating_point() or on_host.is_complex()):
        note = _note(on_host)
        if not is_told:
            is_all = on_host.nbytes == on_host.untyped_storage().nbytes()
            is_taken = on_host.numel() > 1 and is_open(torch, x)
            if is_taken:
                on_host.fill_(True)
            note = _noted(on_host)
            is_old = is_all and (is_taken or not is_current(x))
            note.version, note.checksum = on_host._version, _checksum(on_host) if is_old else None
        elif note is not None:
            note.version = _LOST


def _is_brought_back(torch: Any, x: Any) -> bool:
    """As it came from the device, unchanged."""
    note = _note(x) if _is_strided(torch, x) else None
    if note is None or not is_current(x):
        return False
    return not x.any() if note.checksum is None else _checksum(x) == note.checksum


def is_old(torch: Any, x: Any) -> bool:
    """It came from a device with what lay there before something changed it that nobody followed."""
    note = _note(x) if _is_strided(torch, x) else None
    return note is not None and note.checksum is not None and _is_brought_back(torch, x)


def _checksum(x: Any) -> int:
    """Of all that lies in its storage on the host, or much of it."""
    storage = x.untyped_storage()
    n_bytes = min(storage.nbytes(), MOST_BYTES)
    return zlib.crc32((ctypes.c_char * n_bytes).from_address(storage.data_ptr()))


def _is_strided(torch: Any, x: Any) -> bool:
    """With a storage, and a count of changes."""
    is_real = x.layout is torch.strided and not x.is_nested and not x.is_inference()
    return is_real and is_plain(torch, x)


def note_share(x: Any, share: float | None) -> None:
    """So much of it is true, which of it nobody knows."""
    if share is not None:
        _noted(x).share = share


def share(x: Any) -> float | None:
    """What was noted of it, or of what it is a part of."""
    note = _note(x)
    return note.share if note is not None and is_current(x) else None


def note_blank(x: Any, version: int) -> None:
    """The program asked for zeros, which lie in all of its storage."""
    note = _noted(x)
    if note.version != _REPEATED:
        note.n_bytes = x.untyped_storage().nbytes()
        note.version, note.is_blank, note.has_zeros, note.depth = version, True, False, 0


def note_change(x: Any, version: int, is_all: bool, depth: int) -> None:
    """It is changed in place, and what lies there is what should; is_all: in all of its storage."""
    note = _noted(x)
    if is_all:
        note.n_bytes = x.untyped_storage().nbytes()
    if note.version >= 0 or (is_all and note.version == _LOST):
        note.has_zeros |= note.is_blank or is_all
        note.version, note.is_blank, note.depth, note.share = version, False, depth, None


def comes_next(x: Any) -> bool:
    """It begins where that ends which was filled in so far of memory that nobody knew: all may be known in the end."""
    note = _note(x)
    is_followed = note is None or note.version == _LOST
    n_bytes, version = (0, 0) if note is None else note.n_filled
    start = x.storage_offset() * x.element_size()
    return is_followed and x.is_contiguous() and x._version == version and start <= n_bytes


def note_filled(x: Any, version: int, depth: int) -> None:
    """The part that comes next."""
    note = _noted(x)
    start = x.storage_offset() * x.element_size()
    n_bytes = max(note.n_filled[0], start + x.nbytes)
    depth = max(depth, note.depth) if note.n_filled[0] > 0 else depth
    note_change(x, version, n_bytes >= note.n_bytes, depth)
    if n_bytes < note.n_bytes:
        note.version, note.n_filled, note.depth = _LOST, (n_bytes, version), depth


def note_count(x: Any, version: int) -> None:
    """Nothing of it changed, which was counted as a change in place; before it all had been followed."""
    note = _note(x)
    if note is not None and version == note.version + 1:  # x.data has a count of its own
        note.n_empty = version if note.n_empty == note.version else note.n_empty
        note.version = version


def note_repeated(x: Any) -> None:
    """A graph changes it in place, whenever it is launched."""
    _noted(x).version = _REPEATED


def note_random(torch: Any, x: Any) -> None:
    """It is changed in place by what nobody knows."""
    if is_repeated(torch):
        note_repeated(x)
    else:
        _noted(x)
        forget(x)


def doubt(torch: Any, x: Any) -> None:
    """What an operator copied there from elsewhere, and changed by what nobody knows, is not believed."""
    if is_gradient(torch, x):
        return
    is_many = x.nbytes > MOST_BYTES and not (x.is_floating_point() or x.is_complex())
    is_believed = is_many or put(torch, x, True) is not None or blank(torch, x) is not None
    if is_believed or is_repeated(torch):
        note_random(torch, x)


def is_followed(x: Any) -> bool:
    """It was changed in place, and whenever it was that was followed."""
    note = _note(x)
    return note is not None and note.version > note.n_empty and is_current(x)


def forget(x: Any, was_followed: bool | None = None) -> None:
    """What was followed is over: there lies what nobody computed, by which loops end.

    Its count of changes is not enough to tell, for x.data has another, and begins anew whenever it is asked for.
    """
    note = _note(x)
    if note is None or note.version < 0 or x.numel() == 0:
        return
    if was_followed is None:  # nothing has counted the change yet
        was_followed = is_followed(x)
    storage = x.untyped_storage()
    n_bytes = x.nbytes if x.is_contiguous() else storage.nbytes()
    if was_followed and not x.is_floating_point() and n_bytes <= MOST_BYTES:
        start = x.data_ptr() if x.is_contiguous() else storage.data_ptr()
        ctypes.memset(start, 0, n_bytes)
    _lose(note)


def _lose(note: _Note) -> None:
    """Nothing is known of it until all of it is filled anew."""
    if note.version != _REPEATED:
        note.version = _LOST
    note.n_empty, note.has_zeros, note.is_blank, note.share = 0, False, False, None
    note.n_filled = 0, 0


def write(torch: Any, x: Any, values: Any, is_new: bool = True, depth: int = 0) -> None:
    """As if a kernel had computed them.  is_new: they are all that lies in its storage, zeros too.

    Not of gradients: what is noted holds their storage, by which autograd would add them up in new memory.
    """
    there = None if depth > MOST_DEPTH else on_host(torch, x)
    if there is None or is_gradient(torch, x):
        return
    there.copy_(values)
    if is_new and not is_repeated(torch):
        note = _noted(x)
        note.n_bytes = x.untyped_storage().nbytes()
        note.version = 0 if note.version == _LOST else note.version
        note.has_zeros, note.is_blank, note.depth = True, False, depth
