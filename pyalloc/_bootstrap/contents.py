"""The contents of device memory in a dry run, read and written in place: the dry run counts the program's copies."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
import zlib
from dataclasses import dataclass
from typing import Any

# The dry run zeroes this much at the start of a block (zeros.c); beyond it lie the contents from before.
MOST_BYTES = 2**24
# Operators: a value that follows from a guess through more of them is unknown, so that loops waiting for it end.
MOST_DEPTH = 2**12
# Bytes of floating-point tensors that are followed if filled (masks, not pictures or parameters), if summed or sorted.
MOST_FRACTIONS, FEW_FRACTIONS = 2**22, 2**20
FEW_NUMBERS = 2**12  # such as lengths or shares, one per sample or graph
MOST_ASKED = 1000  # times that one mask is answered: ends loops that wait for kernels we do not see
# Instead of a version: a CUDA graph changes the storage at each launch; a change was not followed.
_REPEATED, _LOST = -1, -2
_PAGE = mmap.PAGESIZE  # the kernel's: 64 KiB on some arm64 machines
_host = ctypes.CDLL(None)


@dataclass
class _Note:
    """What is known of a storage.

    n_bytes: size of the storage.  resize_() changes it without raising torch's version.
    version: torch's count of in-place changes; all changes up to it were followed.  Below 0: _REPEATED or _LOST.
    n_empty: changes up to this version changed nothing.
    has_zeros: zeros in it are real; otherwise they may only mean that no kernel computed anything.
    is_blank: the program asked for zeros, and kernels that we do not see may have filled them in since.
    depth: number of operators between a guess (evenly spread places) and this value; 0: it is no guess.
    share: the share of its elements that is true; which ones is unknown.
    n_asked: how often the program asked whether all elements of such a blank are true.
    n_filled: (bytes, version): so many bytes from its start on were filled in, part by part, up to that version.
    checksum: of a host tensor copied from a device tensor that had changed in a way nobody followed.  Needed because
        a write through numpy() does not raise the version.
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
    """Copies to the host whose contents were the same as on a card."""

    known_copies: int = 0


reads = Reads()
changes_are_followed = True  # in-place ones; False on older torch, which has no hook for them
_notes: dict[int, _Note] = {}  # by storage; a note is removed with its storage


def is_plain(torch: Any, x: Any) -> bool:
    """Whether it has memory of its own; wrappers and fake tensors only stand for others."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    is_wrapped = is_wrapped or torch._is_functional_tensor(x)
    return not is_wrapped and type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def on_host(torch: Any, x: Any, most_bytes: int = MOST_BYTES) -> Any:
    """The same memory as a host tensor; None if it is empty or larger than most_bytes."""
    if x.numel() == 0 or not is_plain(torch, x) or x.data_ptr() == 0:
        return None
    reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    n_bytes = reach * x.element_size()
    if max(n_bytes, x.nbytes) > most_bytes:  # nbytes of an expanded tensor exceeds its span
        return None
    there = (ctypes.c_char * n_bytes).from_address(x.data_ptr())
    return torch.frombuffer(there, dtype=x.dtype).as_strided(x.shape, x.stride())


def read(torch: Any, x: Any) -> Any:
    """A copy on the host, of any contents and size.  Waits for the stream, as operators that read from a device do."""
    if not x.is_cuda:
        return x
    torch.cuda.current_stream(x.device).synchronize()
    there = on_host(torch, x, sys.maxsize)
    return torch.empty(x.shape, dtype=x.dtype) if there is None else there.clone()


def _is_untouched(x: Any) -> bool:
    """Whether nobody has written there yet.  Asks mincore(), because reading would make the kernel provide pages."""
    start = x.data_ptr() & -_PAGE
    end = x.data_ptr() + (x.nbytes if x.is_contiguous() else 1)
    seen = (ctypes.c_ubyte * -((start - end) // _PAGE))()
    asked = _host.mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), seen)
    return bool(asked == 0 and not bytes(seen).strip(b"\0"))


def is_repeated(torch: Any) -> bool:
    """Whether a CUDA graph is being captured: its operators run again later, with other numbers."""
    return bool(torch.cuda.is_current_stream_capturing())


def there(torch: Any, x: Any) -> Any:
    """Its contents, not copied; zeros if no kernel computed anything.  None where the contents say nothing."""
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
    """A host copy of what the program put there, or of what follows from it, with its in-place changes.

    None if it is zeros that a kernel might have computed, or if a change to it could not be followed.
    """
    note = _note(x)
    is_lost = note is not None and note.version < 0
    found = None if is_lost or not (changes_are_followed or is_current(x)) else _told(torch, x)
    return None if found is None else found.clone()


def put(torch: Any, x: Any, takes_floats: bool = False) -> Any:
    """What the program put there, or what follows from it, not copied.

    None for floating point unless takes_floats, and None after an in-place change that nobody followed: a loop that
    counts down in the tensor would never end on its old value.
    """
    if not x.is_cuda:
        return None if _is_brought_back(torch, x) else x
    is_whole = not (x.is_floating_point() or x.is_complex())
    if not (is_whole or takes_floats) or not is_current(x):
        return None
    return _told(torch, x)


def blank(torch: Any, x: Any) -> Any:
    """Zeros that the program asked for, if nothing shows that they were filled in since; None otherwise."""
    note = _note(x)
    return on_host(torch, x) if note is not None and note.is_blank and is_current(x) else None


def is_open(torch: Any, x: Any) -> bool:
    """Is it a mask, or part of one, whose choice is unknown?"""
    return x.dtype == torch.bool and told(torch, x) is None and blank(torch, x) is None


def is_still_false(x: Any) -> bool:
    """Whether it is blank(), at most MOST_ASKED times: a loop may be waiting for kernels that we do not see."""
    note = _note(x)
    if note is None or not note.is_blank or not is_current(x):
        return False
    note.n_asked += 1
    return note.n_asked <= MOST_ASKED


def operands(
    torch: Any, args: Any, takes_floats: bool, knows_other: bool = False, takes_blank: bool = True
) -> Any:
    """All arguments on the host; None if one of them is unknown.

    takes_blank: blank zeros count as zeros if another argument is known.
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
    """One argument on the host; NotImplemented if it is unknown.  Notes in kinds whether it was known or blank."""
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
    """Whether even zeros in it are known, provided that nothing has changed it in place since."""
    note = _note(x)
    return note is not None and note.has_zeros


def is_noted(x: Any) -> bool:
    """Whether anything is, or was, known about its storage."""
    return _note(x) is not None


def is_current(x: Any) -> bool:
    """Whether all in-place changes were followed.  A view made inside an operator may have version 0."""
    if x.is_inference():
        return False
    note = _note(x)
    last = 0 if note is None else note.version
    return last >= 0 and x._version in (0, last)


def depth(torch: Any, args: Any) -> int:
    """The depth of a result of these arguments."""
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
    """Its contents; None if they are zeros that a kernel might have computed."""
    found = there(torch, x)
    return found if found is None or _is_sure(x) or found.any() else None


def _is_sure(x: Any) -> bool:
    """Whether it is known, zeros or not.  Avoids scanning a large mask after each sample that is filled in."""
    return is_known(x) and is_current(x)


def _note(x: Any) -> _Note | None:
    """Its storage's note, if any; makes no Python object for the storage.

    From torch 2.10 on such an object holds the storage, and autograd then sums gradients in new memory, not in place.
    """
    import torch

    note = _notes.get(torch._C._storage_address(x))
    if note is not None and note.n_bytes != x.untyped_storage().nbytes():
        _lose(note)
    return note


def is_gradient(torch: Any, x: Any) -> bool:
    """Whether one of torch's own backward formulas has just made it: nobody asks for the values of those.

    False for what the program finds as .grad, which it may change itself and which CUDA graphs add to.
    """
    node = torch._C._current_autograd_node()
    if node is None or not (x.is_floating_point() or x.is_complex()):
        return False
    if node.name().endswith("AccumulateGrad"):
        return False
    caller: Any = sys._getframe(1)
    while caller is not None and caller.f_globals.get("__package__") == __package__:
        caller = caller.f_back
    # If the engine runs Python, such as a checkpoint's recomputation, the caller is another function.
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
    """Notes a copy from device to host, so that zeros nobody computed stay unknown once they are copied back.

    Offloaded activations come back, masks among them, and backward needs the same choice again.  An unknown mask is
    filled with True on the host, too: programs keep points on the host and their scores on the device.
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
    """Is this host tensor still as it came from the device?"""
    note = _note(x) if _is_strided(torch, x) else None
    if note is None or not is_current(x):
        return False
    return not x.any() if note.checksum is None else _checksum(x) == note.checksum


def is_old(torch: Any, x: Any) -> bool:
    """Did this host tensor come from a device tensor that a change nobody followed had left outdated?"""
    note = _note(x) if _is_strided(torch, x) else None
    return note is not None and note.checksum is not None and _is_brought_back(torch, x)


def _checksum(x: Any) -> int:
    """The checksum of its storage on the host, of at most MOST_BYTES."""
    storage = x.untyped_storage()
    n_bytes = min(storage.nbytes(), MOST_BYTES)
    return zlib.crc32((ctypes.c_char * n_bytes).from_address(storage.data_ptr()))


def _is_strided(torch: Any, x: Any) -> bool:
    """Does it have a storage and a version?"""
    is_real = x.layout is torch.strided and not x.is_nested and not x.is_inference()
    return is_real and is_plain(torch, x)


def note_share(x: Any, share: float | None) -> None:
    """Notes which share of it is true, though not which elements."""
    if share is not None:
        _noted(x).share = share


def share(x: Any) -> float | None:
    """The share noted for it, or for the tensor that it is a part of."""
    note = _note(x)
    return note.share if note is not None and is_current(x) else None


def note_blank(x: Any, version: int) -> None:
    """Notes that the program asked for zeros in the whole storage."""
    note = _noted(x)
    if note.version != _REPEATED:
        note.n_bytes = x.untyped_storage().nbytes()
        note.version, note.is_blank, note.has_zeros, note.depth = version, True, False, 0


def note_change(x: Any, version: int, is_all: bool, depth: int) -> None:
    """Notes an in-place change after which the contents are right; is_all: it changed the whole storage."""
    note = _noted(x)
    if is_all:
        note.n_bytes = x.untyped_storage().nbytes()
    if note.version >= 0 or (is_all and note.version == _LOST):
        note.has_zeros |= note.is_blank or is_all
        note.version, note.is_blank, note.depth, note.share = version, False, depth, None


def comes_next(x: Any) -> bool:
    """Does it begin where the filled-in part of unknown memory ends?  Filled part by part, all may become known."""
    note = _note(x)
    is_followed = note is None or note.version == _LOST
    n_bytes, version = (0, 0) if note is None else note.n_filled
    start = x.storage_offset() * x.element_size()
    return is_followed and x.is_contiguous() and x._version == version and start <= n_bytes


def note_filled(x: Any, version: int, depth: int) -> None:
    """Notes that the part x, for which comes_next() held, was filled in."""
    note = _noted(x)
    start = x.storage_offset() * x.element_size()
    n_bytes = max(note.n_filled[0], start + x.nbytes)
    depth = max(depth, note.depth) if note.n_filled[0] > 0 else depth
    note_change(x, version, n_bytes >= note.n_bytes, depth)
    if n_bytes < note.n_bytes:
        note.version, note.n_filled, note.depth = _LOST, (n_bytes, version), depth


def note_count(x: Any, version: int) -> None:
    """Notes an in-place operator that changed nothing but raised the version, after changes that were all followed."""
    note = _note(x)
    if note is not None and version == note.version + 1:  # x.data has a count of its own
        note.n_empty = version if note.n_empty == note.version else note.n_empty
        note.version = version


def note_repeated(x: Any) -> None:
    """Notes that a CUDA graph changes it in place at each launch."""
    _noted(x).version = _REPEATED


def note_random(torch: Any, x: Any) -> None:
    """Notes that it is changed in place to unknown values."""
    if is_repeated(torch):
        note_repeated(x)
    else:
        _noted(x)
        forget(x)


def doubt(torch: Any, x: Any) -> None:
    """Stops believing a copy that an operator made and changed to unknown values."""
    if is_gradient(torch, x):
        return
    is_many = x.nbytes > MOST_BYTES and not (x.is_floating_point() or x.is_complex())
    is_believed = is_many or put(torch, x, True) is not None or blank(torch, x) is not None
    if is_believed or is_repeated(torch):
        note_random(torch, x)


def is_followed(x: Any) -> bool:
    """Whether it was changed in place, and every change was followed."""
    note = _note(x)
    return note is not None and note.version > note.n_empty and is_current(x)


def forget(x: Any, was_followed: bool | None = None) -> None:
    """Stops following it and zeroes what it followed, as if nobody had computed it: loops end on such contents.

    Comparing versions is not enough: each access to x.data makes a tensor with a version that starts at 0.
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
    """Nothing is known about the storage any more until all of it is filled again."""
    if note.version != _REPEATED:
        note.version = _LOST
    note.n_empty, note.has_zeros, note.is_blank, note.share = 0, False, False, None
    note.n_filled = 0, 0


def write(torch: Any, x: Any, values: Any, is_new: bool = True, depth: int = 0) -> None:
    """Writes values as if a kernel had computed them.  is_new: they fill its storage, and zeros among them are real.

    Skips gradients: a note holds their storage, and autograd would then add them up in new memory.
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
