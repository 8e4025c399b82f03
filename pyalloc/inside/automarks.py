"""Marks phases, steps and tensors' categories without changes to the program, through torch's global hooks.

Forward: each call of an outermost module ("inference" if gradients are off, "loss" for classes named ...Loss); inner
modules get marks of their own.  Backward: each run of autograd's engine.  Optimizer: the hooks around step().
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from pyalloc import marks
from pyalloc.common.config import CUBLAS_NOTES
from pyalloc.inside import chained, devices, tensors, uses

MODULE = "module:"  # phases of modules carry this prefix
_At = tuple[int, int]  # device, address
_Told = tuple[str, Any]  # category, weak reference to the storage
_Kind = tuple[type[Any], frozenset[int]]  # an optimizer's class and the parameters it is for
# A call in progress: id of the module or optimizer, phase, stack depth of its caller (-1: inside another).
_Open = tuple[int, str, int]
# Modules with torch's functions between the caller of a module or step and the hooks.
_CALLING = {
    __name__,
    "torch.nn.modules.module",
    "torch.optim.optimizer",
    "torch.optim.lr_scheduler",
}


def _harmless(look: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps exceptions away from the program: the modules and optimizers looked at may be of any class."""

    @functools.wraps(look)
    def call(marks: AutoMarks, *args: Any) -> Any:
        if marks.is_blind:
            return None
        try:
            return look(marks, *args)
        except Exception as error:
            marks.is_blind = True
            why = (
                "categories of blocks are no longer recorded, because a module or optimizer raised"
            )
            print(f"pyalloc: {why} {error!r}", file=sys.stderr)
            return None

    return call


class AutoMarks:
    """The hooks of one recording."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.local = threading.local()
        # All weak: keeping alive what the program drops would change its memory use.
        self.names: dict[int, tuple[weakref.ref[Any], str]] = {}
        self.roots: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.classes: list[str] = []  # of the optimizers
        # Those that stepped since the last step ended.  By id, since a class with __eq__ has no hash.
        self.stepped: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.most_doubled = 0
        self.unused = 0  # bytes of gradients that no optimizer uses
        self.untrained = ""  # classes of models
        self.known: dict[_At, _Told] = {}  # parameters and state already told
        self.uses = uses.Uses()
        self.left_over = 0  # bytes that models hold which were trained earlier
        self.handles: list[Any] = []
        self.undo: list[Callable[[], None]] = []
        self.explicit_steps = False
        self.is_blind = False  # the program's modules or optimizers could not be looked at
        self.retains_graph = False  # has any backward done so?
        self.creates_graph = False
        self.chained = chained.Runs()
        self.n_backwards = 0  # in progress
        self.next_step = 0
        self.torch: Any = None

    def install(self, torch: Any) -> None:
        """Registers all hooks; step 0 begins."""
        self.torch = torch
        modules = importlib.import_module("torch.nn.modules.module")
        optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the name
        post: dict[str, Any] = {}
        if "always_call" in inspect.signature(modules.register_module_forward_hook).parameters:
            post["always_call"] = True
        self.handles = [
            modules.register_module_forward_pre_hook(self.before_module),
            modules.register_module_forward_hook(self.after_module, **post),
            optimizers.register_optimizer_step_pre_hook(self.before_optimizer),
            optimizers.register_optimizer_step_post_hook(self.after_optimizer),
        ]
        # Hooks run again for the module that torch.compile() wraps around another; torch warns about it at each call.
        self._ignore(r"Using `torch\.compile\(module\)` when there are global")
        self._wrap_backward(torch)
        self._wrap_empty_cache(torch)
        for library, note in CUBLAS_NOTES.items():
            self._wrap_workspace(torch, library, note)
        if not self.recorder.source.has_record_stream:
            self._wrap_record_stream(torch)
        marks.listeners.append(self)
        self._auto_step()

    def _ignore(self, warning: str) -> None:
        """Ignores the warning until the recording ends."""
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", warning)
        ours = warnings.filters[0]

        def undo() -> None:
            if ours not in before and ours in warnings.filters:
                warnings.filters.remove(ours)  # type: ignore[attr-defined]

        self.undo.append(undo)

    def remove(self) -> None:
        """Takes all hooks away."""
        for handle in self.handles:
            handle.remove()
        for undo in self.undo:
            undo()
        self.handles, self.undo = [], []
        if self in marks.listeners:
            marks.listeners.remove(self)

    # ---- marks of the program itself ----

    def on_step(self, number: int) -> None:
        """The program marks its own steps: ours stop."""
        self.explicit_steps = True

    def on_phase(self, name: str, begins: bool) -> None:
        """Does nothing: the recorder is a listener, too."""

    def _auto_step(self) -> None:
        if not self.explicit_steps:
            self.recorder.on_step(self.next_step)
            self.next_step += 1

    # ---- modules ----

    def _is_compiling(self) -> bool:
        compiler = getattr(self.torch, "compiler", None)
        return bool(compiler is not None and compiler.is_compiling())

    def _open(self, kind: str) -> list[_Open]:
        """The modules or steps in progress in this thread, outermost first."""
        found: list[_Open] = self.local.__dict__.setdefault(kind, [])
        return found

    def _begin(self, stack: list[_Open], key: int, name: str, depth: int) -> None:
        stack.append((key, name, depth))
        self.recorder.on_phase(name, True)

    def _end(self, stack: list[_Open], first: int) -> None:
        """Ends the calls from index `first` on."""
        while len(stack) > first:
            self.recorder.on_phase(stack.pop()[1], False)

    def _end_those_left(self, depth: int) -> None:
        """Ends calls that an exception left without a hook being called: out of memory in a step, Ctrl-C.

        A call that is really in progress has a caller less deep in the stack than `depth`.
        """
        for stack in self._open("modules"), self._open("steps"):
            left = (i for i, (_, _, begun) in enumerate(stack) if begun >= depth)
            self._end(stack, next(left, len(stack)))

    def before_module(self, module: Any, inputs: Any) -> None:
        """Global forward pre-hook."""
        if self._is_compiling():
            return
        stack, depth, name = self._open("modules"), -1, self._name(module)
        # Avoid _depth() where possible: it is slow.
        if not stack or not name or stack[0][0] == id(module):
            depth = _depth()
            self._end_those_left(depth)
        if not stack:
            self._learn(module)
            phase = self._outermost(module)
            if phase != "inference":
                self.uses.call(module)
            if phase == "forward" and not self.n_backwards:  # there, checkpoints'
                self._look_for_chain(inputs)
            self._begin(stack, id(module), phase, depth)
            if name:  # a part of a model is called by itself, as by a checkpoint in backward
                self._begin(stack, 0, MODULE + name, depth)
        else:
            name = self._name_in(stack[-1], module, name) or type(module).__name__
            self._begin(stack, id(module), MODULE + name, depth)

    def after_module(self, module: Any, inputs: Any, output: Any) -> None:
        """Global forward hook; also called after an exception, if this torch supports that."""
        if not self._is_compiling():
            self._end_of("modules", module)

    def _end_of(self, kind: str, whom: Any) -> None:
        stack = self._open(kind)
        found = (i for i in range(len(stack) - 1, -1, -1) if stack[i][0] == id(whom))
        self._end(stack, next(found, len(stack)))

    def _outermost(self, module: Any) -> str:
        if not self.torch.is_grad_enabled():
            return "inference"
        return "loss" if type(module).__name__.endswith("Loss") else "forward"

    def _name(self, module: Any) -> str:
        """The path of a module in the largest model seen around it, or ""."""
        reference, name = self.names.get(id(module), (None, ""))
        return name if reference is not None and reference() is module else ""

    def _name_in(self, call: _Open, module: Any, name: str) -> str:
        """The path of a module in the call that it is part of: several may share one, such as an activation."""
        around = call[1].removeprefix(MODULE)
        if not name or around == call[1] or name.startswith(f"{around}."):
            return name
        parent = self.names.get(call[0], (lambda: None, ""))[0]()
        own = getattr(parent, "_modules", {})
        return next((f"{around}.{key}" for key, each in own.items() if each is module), name)

    @_harmless
    def _learn(self, root: Any) -> None:
        if self.roots.get(id(root)) is root:
            return
        self.roots[id(root)] = root
        self.uses.begin(root)
        for name, module in root.named_modules():
            if name and name.count(".") >= self._name(module).count("."):
                self.names[id(module)] = (weakref.ref(module), name)
        found: dict[_At, _Told] = {}
        self._note_root(found, root)
        for at, (category, _) in found.items():  # even if something else was there before
            self._tell(at, category)
        self.known.update((at, told) for at, told in found.items() if told[0] != "gradients")

    @_harmless
    def _look_for_chain(self, inputs: Any) -> None:
        self.chained.add(tensors.has_history(inputs, self.torch.Tensor))

    def _end_run(self) -> None:
        told = self.chained.end()
        if told:
            self.recorder.add("user", f"chained={told}")

    # ---- backward and optimizer ----

    def _wrap_backward(self, torch: Any) -> None:
        """Wraps the function that backward() and grad() end in, so that earlier imports of those names are covered."""
        original = getattr(torch.autograd, "_engine_run_backward", None)
        if original is None:
            return
        self.recorder.add("user", "create_graph=False")

        @functools.wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self._is_compiling():
                return original(*args, **kwargs)
            if not self.retains_graph and _retains_graph(*args):
                self.retains_graph = True
                self.recorder.add("user", "retain_graph=True")
            if not self.creates_graph and _creates_graph(*args):
                self.creates_graph = True
                self.recorder.add("user", "create_graph=True")
            self._end_run()
            self.recorder.on_phase("backward", True)
            self.n_backwards += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.n_backwards -= 1
                self.recorder.on_phase("backward", False)

        self._put(torch.autograd, "_engine_run_backward", run_backward)

    def _wrap_empty_cache(self, torch: Any) -> None:
        """Records empty_cache(): neither history has it, and without it replays would keep that memory."""
        for name in ("_cuda_emptyCache", "_accelerator_emptyCache"):
            original = getattr(torch._C, name, None)
            if original is not None:
                self._put(torch._C, name, functools.partial(self._empty_cache, torch, original))

    def _empty_cache(self, torch: Any, original: Callable[[], None]) -> None:
        for index in devices.in_use(torch):
            self.recorder.add("empty_cache", "", device=index)
        original()

    def _wrap_workspace(self, torch: Any, library: str, note: str) -> None:
        """Records each size that is set: torch only tells the current one."""
        name = f"_cuda_set{library}WorkspaceSize"
        original = getattr(torch._C, name, None)
        if original is None:
            return
        seen = [getattr(torch._C, f"_cuda_get{library}WorkspaceSize")()]

        def set_size(n_bytes: int) -> None:
            original(n_bytes)
            if n_bytes not in seen:
                seen.append(n_bytes)
                self.recorder.add("user", f"{note}={','.join(map(str, seen))}")

        self._put(torch._C, name, set_size)

    def _put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replaces an attribute until the recording ends."""
        original = getattr(owner, name)
        setattr(owner, name, function)

        def undo() -> None:
            if getattr(owner, name) is function:
                setattr(owner, name, original)

        self.undo.append(undo)

    def _wrap_record_stream(self, torch: Any) -> None:
        """Records record_stream(), which torch's history does not have; calls from C++ are not seen."""
        original = torch.Tensor.record_stream

        def record_stream(tensor: Any, stream: Any) -> Any:
            is_seen = tensor.is_cuda and not self._is_compiling()
            at = tensors.memory(tensor)[1] if is_seen else 0
            if at:
                index, number = tensor.device.index, stream.cuda_stream
                self.recorder.add("record_stream", "", addr=at, arg=number, device=index)
            return original(tensor, stream)

        record_stream.__doc__ = original.__doc__
        torch.Tensor.record_stream = record_stream

        def undo() -> None:
            if torch.Tensor.record_stream is record_stream:
                del torch.Tensor.record_stream  # uncovers torch._C.TensorBase's

        self.undo.append(undo)

    def before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Global step pre-hook: the gradients are alive now, or once the closure has computed them.

        Replaces the closure by one after which the phase begins.
        """
        self.optimizers.setdefault(id(optimizer), optimizer)
        name = type(optimizer).__name__
        if name not in self.classes:  # stacks cannot tell Adam from AdamW
            self.classes.append(name)
            self.recorder.add("user", f"optimizers={', '.join(self.classes)}")
        depth = _depth()
        self._end_those_left(depth)
        _, *given = args
        if given and callable(given[0]):
            return (args[0], self._apart(given[0], optimizer, depth), *given[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._apart(kwargs["closure"], optimizer, depth)}
        self._begin_step(optimizer, depth)
        return None

    def _begin_step(self, optimizer: Any, depth: int) -> None:
        self._end_run()
        self.categorise()
        self._begin(self._open("steps"), id(optimizer), "optimizer", depth)

    def _apart(self, closure: Callable[..., Any], optimizer: Any, depth: int) -> Callable[..., Any]:
        """The closure, whose forward and backward pass do not count as the optimizer's step."""

        @functools.wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._end_of("steps", optimizer)  # LBFGS calls it several times
            result = closure(*args, **kwargs)
            self._begin_step(optimizer, depth)
            return result

        return call

    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Global step post-hook: the step() of the first live optimizer ends a step.

        An optimizer that takes its place, with the same parameters, ends the steps from then on.
        """
        if id(optimizer) not in self.optimizers:
            return  # the recording began during its step()
        self._end_of("steps", optimizer)
        self.categorise()
        self.uses.n_steps += 1
        first = _alive(self.optimizers)[0]
        if id(optimizer) in self.stepped and (
            tensors.is_alike(first, optimizer) or self._is_left_over(first)
        ):
            others = [each for each in _alive(self.optimizers) if each is not optimizer]
            self.optimizers.clear()
            self.optimizers.update((id(each), each) for each in (optimizer, *others))
            first = optimizer
        if first is optimizer:
            self.stepped.clear()
            if len(self.optimizers) > 1:
                self._tell_doubled()  # once a step: there may be an optimizer for each parameter
            self._tell_unused()
            self._tell_left_over()
            self._auto_step()
        else:
            self.stepped[id(optimizer)] = optimizer

    @_harmless
    def _tell_doubled(self) -> None:
        """Notes the bytes of state that optimizers of one class with exactly the same parameters hold beyond one's."""
        seen: set[_At] = set()  # a wrapper may share the state of what it wraps
        total = 0
        held: dict[_Kind, dict[int, list[int]]] = {}
        for optimizer in _alive(self.optimizers):
            kind = type(optimizer), frozenset(tensors.parameters(optimizer))
            for parameter, state in list(optimizer.state.items()):
                mine: dict[_At, int] = {}
                for value in tensors.within(state):
                    self._weigh(mine, value)
                n = sum(mine[at] for at in mine.keys() - seen)
                seen.update(mine)
                total += n
                held.setdefault(kind, {}).setdefault(id(parameter), []).append(n)
        each = [n for one in held.values() for n in one.values()]
        doubled = sum(sum(n) - max(n) for n in each)
        if doubled > self.most_doubled:
            self.most_doubled = doubled
            n_holders = max(sum(map(bool, n)) for n in each)
            self.recorder.add(
                "user", f"doubled_state={doubled} bytes of {total}, {n_holders} optimizers"
            )

    @_harmless
    def _tell_unused(self) -> None:
        """Notes gradients that no optimizer uses, and models that have none."""
        stepped = {p for each in _alive(self.optimizers) for p in tensors.parameters(each)}
        found: dict[_At, int] = {}
        models = []
        trainable = list(self._trainable())
        for root, gradient in self.uses.unused(trainable, stepped):
            self._weigh(found, gradient)
            models.append(root)
        total = sum(found.values())
        if total != self.unused:
            self.unused = total
            kinds = ", ".join(uses.classes(models)[:4])
            self.recorder.add("user", f"unused_gradients={total} bytes, {kinds}")
        untrained = ", ".join(uses.classes(self.uses.untrained(root for root, _ in trainable)))
        if untrained != self.untrained:
            self.untrained = untrained
            self.recorder.add("user", f"untrained={untrained}")

    def _trainable(self) -> Iterator[tuple[Any, Any]]:
        """Models, and their parameters that take gradients."""
        for root in _alive(self.roots):
            yield from ((root, p) for p in self._parameters_of(root) if p.requires_grad)

    def _left_over(self) -> list[Any]:
        roots = _alive(self.roots)  # losses have no parameters
        return self.uses.left_over(
            each for each in roots if next(self._parameters_of(each), None) is not None
        )

    @_harmless
    def _is_left_over(self, optimizer: Any) -> bool:
        """Does it update a model that is not used any more?"""
        mine = tensors.parameters(optimizer)
        return any(
            id(each) in mine for root in self._left_over() for each in self._parameters_of(root)
        )

    @_harmless
    def _tell_left_over(self) -> None:
        """Notes what models hold that were trained earlier."""
        left = self._left_over()
        total = self._held_by(left) if left else 0
        if total != self.left_over:
            self.left_over = total
            kinds = ", ".join(uses.classes(left))
            self.recorder.add("user", f"left_over={total} bytes, {len(left)}, {kinds}")

    def _held_by(self, models: list[Any]) -> int:
        """Bytes of models and their optimizers' state, apart from what they share with other models."""
        held: dict[_At, _Told] = {}
        shared: dict[_At, _Told] = {}
        for root in _alive(self.roots):
            self._note_root(held if any(root is each for each in models) else shared, root)
        found = {
            at: storage().nbytes()
            for at, (_, storage) in held.items()
            if at not in shared and storage() is not None
        }
        parameters = {id(each) for root in models for each in self._parameters_of(root)}
        for optimizer in _alive(self.optimizers):
            if tensors.parameters(optimizer) <= parameters:
                for value in tensors.state(optimizer):
                    self._weigh(found, value)
        return sum(found.values())

    def _weigh(self, found: dict[_At, int], value: Any) -> None:
        for at, storage in self._memories(value):
            found[at] = storage.nbytes()

    # ---- categories ----

    @_harmless
    def categorise(self) -> None:
        """Tells which live blocks hold parameters, buffers, gradients and optimizer state."""
        found: dict[_At, _Told] = {}
        for optimizer in _alive(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._note_parameter(found, parameter)
            for value in tensors.state(optimizer):
                self._note(found, value, "optimizer state")
        for root in _alive(self.roots):
            self._note_root(found, root)
        for at, told in found.items():
            if told[0] == "gradients" or not _is_same(self.known.get(at), told):
                self._tell(at, told[0])
        self.known = {at: told for at, told in found.items() if told[0] != "gradients"}

    def _tell(self, at: _At, category: str) -> None:
        device, address = at
        self.recorder.add("category", category, addr=address, device=device)

    def _note_root(self, found: dict[_At, _Told], root: Any) -> None:
        for parameter in self._parameters_of(root):
            self._note_parameter(found, parameter)
        for buffer in root.buffers():
            self._note(found, buffer, "buffers")

    def _note_parameter(self, found: dict[_At, _Told], parameter: Any) -> None:
        self._note(found, parameter, "parameters")
        gradient = tensors.gradient(parameter)
        if gradient is not None:
            self._note(found, gradient, "gradients")

    def _parameters_of(self, root: Any) -> Iterator[Any]:
        """The parameters as torch knows them: a program may override parameters() to return, say, groups."""
        found: Iterator[Any] = self.torch.nn.Module.parameters(root)
        return found

    def _note(self, found: dict[_At, _Told], value: Any, category: str) -> None:
        for at, storage in self._memories(value):
            found.setdefault(at, (category, weakref.ref(storage)))

    def _memories(self, value: Any, depth: int = 0) -> Iterator[tuple[_At, Any]]:
        """Addresses of a tensor's storage; for one made of others, such as a DTensor or a quantized one, theirs."""
        if not isinstance(value, self.torch.Tensor) or not value.is_cuda:
            return
        storage, address = tensors.memory(value)
        if address:
            yield (value.device.index, address), storage
        elif depth < tensors.DEPTH:
            for part in tensors.parts(value):
                yield from self._memories(part, depth + 1)


def _alive(known: weakref.WeakValueDictionary[int, Any]) -> list[Any]:
    """Its values; safe while other threads add some."""
    each = [reference() for reference in known.valuerefs()]
    return [value for value in each if value is not None]


def _depth() -> int:
    """The stack depth of the caller of the module or step whose hook calls this."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _CALLING:
        frame = frame.f_back
    n = 0
    while frame is not None:
        n += 1
        frame = frame.f_back
    return n


def _retains_graph(
    tensors: Any, grad_tensors: Any, retain_graph: bool, create_graph: bool, *_args: Any
) -> bool:
    """Does the program ask to keep the graph?  With create_graph it is kept anyway."""
    return retain_graph and not create_graph


def _creates_graph(
    tensors: Any, grad_tensors: Any, retain_graph: bool, create_graph: bool, *_args: Any
) -> bool:
    return create_graph


def _is_same(before: _Told | None, now: _Told) -> bool:
    """Is it already noted?  Compares storages: a tensor moved off the device and back may be in a new block there."""
    return before is not None and before[0] == now[0] and before[1]() is now[1]()
