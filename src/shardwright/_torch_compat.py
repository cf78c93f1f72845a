"""Every private or moving PyTorch interface the project relies on, behind one thin module.

Each function here names the interface it hides and is tested on every supported version (2.11 to 2.13). Nothing else in
the project may touch an underscore of torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import linecache
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.process_wide import in_turn, replaced
from shardwright.waiting import wait_for

DispatchMode = TorchDispatchMode
"""The base of modes that see every operator call."""

MODULES_OF_A_CAPTURE = ("torch.export._trace",)
"""What PyTorch imports when it exports for the first time, a third of a second."""
GROUPED_PRODUCT: Any = getattr(torch, "_grouped_mm", None)
"""The product of groups of rows with one matrix each, where PyTorch has it."""


def profiler_runs() -> bool:
    """Whether a profiler of torch's is recording in this process (``torch.autograd.profiler._is_profiler_enabled``)."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


foreach_norm = torch._foreach_norm
foreach_scale = torch._foreach_mul_
"""What ``clip_grad_norm_`` takes norms and scales gradients with, many at once."""


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """Leaves of a nested structure and the spec that restores it."""
    return pytree.tree_flatten(tree)


def flatten_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with readable paths such as ``['labels']`` or ``[0]``."""
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def unflatten_tree(leaves: list[Any], spec: Any) -> Any:
    return pytree.tree_unflatten(leaves, spec)


def map_tree(function: Any, tree: Any) -> Any:
    return pytree.tree_map(function, tree)


def dump_tree(spec: Any) -> str:
    """A tree spec as a JSON string."""
    return pytree.treespec_dumps(spec)


def load_tree(text: str) -> Any:
    """A tree spec from :func:`dump_tree`; the classes in it must have been registered (importing them does that)."""
    return pytree.treespec_loads(text)


def with_list_beside(text: str, leaves: int) -> str:
    """The :func:`dump_tree` of ``(what text describes, [leaf, leaf, …])``.

    >>> load_tree(with_list_beside(dump_tree(flatten_tree({"a": 0})[1]), 2)).num_leaves
    3
    """
    both = json.loads(dump_tree(flatten_tree((0, [0] * leaves))[1]))
    both[1]["children_spec"][0] = json.loads(text)[1]
    return json.dumps(both)


def names_in_tree(text: str) -> set[str]:
    """The serialised names of the classes in a :func:`dump_tree` that pytree does not know in this process."""

    def names(spec: Any) -> set[str]:
        own = {spec["type"]} if isinstance(spec["type"], str) else set()
        return own.union(*(names(child) for child in spec["children_spec"]))

    return {name for name in names(json.loads(text)[1]) if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE}


def tree_runs_nothing(text: str) -> bool:
    """Whether a tree spec that came out of a file can be loaded and filled without importing or calling what it names.

    Contexts of enumerations and of ``defaultdict`` name modules that pytree would import, and nodes with a reader of their
    own hand the file's text to it.
    """

    def harmless(spec: Any) -> bool:
        kind, context = spec["type"], spec["context"]
        if kind is None:
            return context is None and not spec["children_spec"]
        found = pytree.SUPPORTED_SERIALIZED_TYPES[pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[kind]]
        if found.from_dumpable_context is not None and kind not in _READ_AS_NAMES:
            return False
        return "__enum__" not in json.dumps(context) and all(harmless(child) for child in spec["children_spec"])

    return harmless(json.loads(text)[1])


_READ_AS_NAMES = ("collections.namedtuple",)
"""Nodes whose context is the name of a class that must have been registered before."""


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """``torch.utils.checkpoint`` calls what it is given and keeps what that saves: the same numbers, nothing computed again.

    Models hold the function ``checkpoint`` itself, so what it calls is replaced.
    """
    from torch.utils import checkpoint

    class Called:
        @staticmethod
        def apply(function: Any, _preserve_random_state: bool, *args: Any) -> Any:
            return function(*args)

    def around(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    with (
        mock.patch.object(checkpoint, "CheckpointFunction", Called),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", around),
    ):
        yield


def is_registered_node(kind: type) -> bool:
    """Whether pytree knows how to open instances of this class."""
    return kind in pytree.SUPPORTED_NODES


def register_dataclass(kind: type) -> None:
    """Let pytree open a plain dataclass, with a serialised name so that specs travel as JSON."""
    torch.export.register_dataclass(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")


def register_namedtuple(kind: type) -> None:
    """Let specs that hold a named tuple travel as JSON (pytree opens named tuples anyway)."""
    pytree._register_namedtuple(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")


def register_object(kind: type, opened: Any, closed: Any) -> None:
    """Let pytree open instances of any class: ``opened(value) -> (items, text)``, ``closed(items, text) -> value``."""

    def paths(value: Any) -> Any:
        items, about = opened(value)
        return [(pytree.MappingKey(index), item) for index, item in enumerate(items)], about

    pytree.register_pytree_node(
        kind,
        opened,
        closed,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        to_dumpable_context=str,
        from_dumpable_context=str,
        flatten_with_keys_fn=paths,
    )


def operator(target: str) -> Any:
    """The callable behind ``"aten.linear.default"``: an ``OpOverload`` looked up in ``torch.ops``."""
    namespace, name, overload = target.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def schema(target: str) -> Any:
    """The operator's schema (argument names, defaults, alias annotations)."""
    return operator(target)._schema


def collective(name: str, *args: Any) -> torch.Tensor:
    """A functional collective (``torch.ops._c10d_functional``), started and not yet waited for."""
    return getattr(torch.ops._c10d_functional, name)(*args)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of :func:`collective`."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


class Pending(NamedTuple):
    """A collective under way: where its result will be, and what to wait for (nothing of its own where it is only traced).

    What it reads is kept by the work itself for as long as it is needed; gloo copies what it reduces and is done with it.
    """

    result: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        if self.work is None:
            return wait(self.result)
        wait_for(self.work)
        return self.result


# What follows goes straight to the process group where numbers are computed: the functional collectives (for the compiler
# and for tensors without data) cost several times the host's time, and gloo's functional gather corrupts the heap
# when other collectives are under way (torch 2.13: a few thousand rounds of five ``all_gather_into_tensor`` and five
# ``all_reduce`` end in a segmentation fault or in "malloc(): unaligned tcache chunk").


def _direct(x: torch.Tensor) -> bool:
    return not torch.compiler.is_compiling() and has_data(x)


def all_reduced(x: torch.Tensor, reduce: str, group: str, in_place: bool = False) -> torch.Tensor:
    """The reduction of the ranks' tensors, awaited; ``in_place``: where this one lies, if it lies densely."""
    if not _direct(x):
        return wait(collective("all_reduce", x.contiguous(), reduce, group))
    total = x if in_place and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    wait_for(group_named(group).allreduce([total], _options("Allreduce", reduce)))
    return total


def start_gathering(x: torch.Tensor, ranks: int, group: str) -> Pending:
    """Begin to gather a contiguous tensor along dim 0."""
    if not _direct(x):
        return Pending(collective("all_gather_into_tensor", x, ranks, group), None)
    whole = x.new_empty((ranks * x.shape[0], *x.shape[1:]) if x.ndim else (ranks,))
    return Pending(whole, gather_into(whole, x, group_named(group)))


def start_scattering(x: torch.Tensor, reduce: str, ranks: int, group: str) -> Pending:
    """Begin to reduce a contiguous tensor and to cut it along dim 0."""
    if not _direct(x):
        return Pending(collective("reduce_scatter_tensor", x, reduce, ranks, group), None)
    mine = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    return Pending(mine, scatter_into(mine, x, group_named(group), reduce))


def exchanged(x: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
    """Send pieces of these lengths along dim 0 to the ranks, and put together what came from each; awaited."""
    if not _direct(x):
        return wait(collective("all_to_all_single", x, received, sent, group))
    arrived = x.new_empty((sum(received), *x.shape[1:]))
    wait_for(group_named(group).alltoall_base(arrived, x, received, sent, _options("AllToAll")))
    return arrived


def scatter_into(mine: torch.Tensor, whole: torch.Tensor, group: Any, reduce: str = "sum") -> Any:
    """Start to reduce and scatter; gives the work to wait for (``reduce_scatter_single`` from 2.13 on)."""
    options = _options("ReduceScatter", reduce)
    if hasattr(group, "reduce_scatter_single"):
        return group.reduce_scatter_single(mine, whole, options)
    return group._reduce_scatter_base(mine, whole, options)


def gather_into(whole: torch.Tensor, mine: torch.Tensor, group: Any) -> Any:
    """Start to gather; gives the work to wait for (``all_gather_single`` from 2.13 on)."""
    options = _options("Allgather")
    if whole.is_complex():
        whole, mine = torch.view_as_real(whole), torch.view_as_real(mine)
    if hasattr(group, "all_gather_single"):
        return group.all_gather_single(whole, mine, options)
    return group._allgather_base(whole, mine, options)


@functools.cache
def _options(kind: str, reduce: str | None = None) -> Any:
    """The options of an asynchronous collective."""
    from torch._C import _distributed_c10d as c10d

    options = getattr(c10d, f"{kind}Options")()
    if reduce is not None:
        options.reduceOp = getattr(c10d.ReduceOp, reduce.upper())
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def returns_list(target: str) -> bool:
    """Whether an operator gives a list of tensors (``split``, ``unbind``), even where the list has one element."""
    returns = schema(target).returns
    return len(returns) == 1 and returns[0].type.kind() == "ListType"


def local_of(tensor: Any) -> torch.Tensor:
    """The local shard of a DTensor, sharing its storage and outside of autograd; a plain tensor is its own shard."""
    return getattr(tensor, "_local_tensor", tensor)


def locals_of(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The local shards of many, without a call for each: optimizers have hundreds, every step."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def copy_all(into: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Copy many small tensors in few kernels (``torch._foreach_copy_``)."""
    for dtype in {x.dtype for x in into}:
        pairs = [(a, b) for a, b in zip(into, given, strict=True) if a.dtype == dtype]
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def scale_all(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply many tensors by one number, in place and in few kernels (``torch._foreach_mul_``)."""
    for dtype in {x.dtype for x in tensors}:
        torch._foreach_mul_([x for x in tensors if x.dtype == dtype], scale.to(dtype))


def group_named(name: str) -> Any:
    """The process group behind a name, as functional collectives call it."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # 2.13 has a type for names


def fake_mode() -> Any:
    """A mode in which tensors have shapes and devices but no memory (``torch._subclasses.FakeTensorMode``)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


@contextmanager
def replaced_vmap(performed: Any) -> Iterator[None]:
    """While this lasts, ``vmap`` calls ``performed(original, settings, args, kwargs)`` (``torch._functorch.apis``)."""
    from torch._functorch import apis

    def instead(original: Any) -> Any:
        def call(func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk: Any, *args: Any, **kwargs: Any) -> Any:
            return performed(original, (func, in_dims, out_dims, randomness, chunk), args, kwargs)

        return call

    with replaced(apis, "vmap_impl", instead):
        yield


@contextmanager
def apart_from_tracing() -> Iterator[None]:
    """While this lasts, a trace under way records nothing; modes that are not the tracer's stay in force."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
    from torch.overrides import _pop_mode, _push_mode

    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    for mode in (kept := [mode for mode in reversed(modes) if not type(mode).__module__.startswith("torch.")]):
        _push_mode(mode)
    try:
        with disable_proxy_modes_tracing():
            yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


def traced_operators(function: Any, tensors: list[torch.Tensor]) -> Any:
    """The operators that a function of tensors performs, below autograd and ``vmap`` (``make_fx``)."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*tensors)


@contextmanager
def without_torchscript() -> Iterator[None]:
    """While this lasts, functions made by ``torch.jit.script``, which no trace sees into, run as the Python they were."""

    def made_of(real: Any) -> Any:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(function, "_torchdynamo_inline", functools.partial(real, function))(*args, **kwargs)

        return call

    with replaced(torch.jit.ScriptFunction, "__call__", made_of):
        yield


@contextmanager
def fake_tolist(answer: Any) -> Iterator[None]:
    """While this lasts, ``tolist`` of a fake tensor is answered by a function (``FakeTensor`` has a method of its own)."""
    from torch._subclasses.fake_tensor import FakeTensor

    with replaced(FakeTensor, "tolist", lambda original: lambda self: answer(original, self)):
        yield


def draws_random_numbers(operator: Any) -> bool:
    """Whether an operator draws from the generator (its tag ``nondeterministic_seeded``)."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def keep_without_readers(operator: Any) -> None:
    """Let FX keep calls of an operator whose result nobody reads (``torch.fx.node.has_side_effect``)."""
    torch.fx.node.has_side_effect(operator)


def default_store() -> Any:
    """The key-value store behind the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def listen_on_loopback() -> None:
    """From now on stores that this process makes for others to find (``env://``, ``tcp://``, torchrun) listen on
    127.0.0.1 alone; ``TCPStore`` by itself listens on every interface, whatever address it is given."""
    # By their names: torch.distributed.rendezvous, asked for as an attribute, is a function.
    for name in ("rendezvous", "elastic.rendezvous.c10d_rendezvous_backend"):
        importlib.import_module(f"torch.distributed.{name}").TCPStore = _store_on_loopback  # type: ignore[attr-defined]


def _store_on_loopback(host_name: str, port: int, *, is_master: bool = False, **options: Any) -> Any:
    from torch.distributed import TCPStore

    if not is_master:
        return TCPStore(host_name, port, is_master=False, **options)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:  # taken: by another store of this process, which several may share, or it says so itself
        listener.close()
        return TCPStore("127.0.0.1", port, is_master=True, **options)
    listener.listen(2048)
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach(), **options)


def taken_for_granted(condition: Any) -> None:
    """From here on tracing takes a condition on unknown sizes to hold (``torch._check``)."""
    torch._check(condition)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, real or fake, lie in the same storage (``torch._C._is_alias_of``)."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]  # not in the stubs


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds values: neither on meta nor fake (``torch._subclasses.FakeTensor``)."""
    if type(tensor) is torch.Tensor:
        return not tensor.is_meta
    from torch._subclasses.fake_tensor import FakeTensor

    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def going_back() -> bool:
    """Whether this thread is inside of a backward pass (where checkpointed blocks are computed once more)."""
    return bool(torch._C._current_graph_task_id() != -1)


def like_dtensor(local: torch.Tensor, like: Any) -> Any:
    """A local tensor as a DTensor laid out as another one, without the checks of the public constructor."""
    from torch.distributed.tensor import DTensor

    # The initialiser does nothing, at several times the price of the rest.
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)


def lie_as(tensor: Any, other: Any) -> None:
    """Give a DTensor, which stays the object that it is, the part and the layout of another of the same shape."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


def without_torch_function() -> Any:
    """A context in which subclasses of tensors are treated by operators as the tensors that they are."""
    return torch._C.DisableTorchFunctionSubclass()


def dtensor_handlers() -> dict[Any, Any]:
    """Operators that DTensors are dispatched on by functions of (operator, args, kwargs) instead of the usual rules."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher._custom_op_handlers


def takes_device(target: str) -> bool:
    """Whether an operator has a keyword ``device``: it creates tensors, or may move them."""
    return any(argument.name == "device" and argument.kwarg_only for argument in schema(target).arguments)


def first_chunk_offsets(tensor: Any) -> tuple[int, ...]:
    """Where the shard that this rank holds of a DTensor begins (``DTensor.__create_chunk_list__``)."""
    return tuple(tensor.__create_chunk_list__()[0].offsets)


def wrapper_tensor(kind: type, shape: tuple[int, ...], like: torch.Tensor) -> Any:
    """An instance of a tensor subclass without memory of its own (``Tensor._make_wrapper_subclass``)."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=like.dtype, device=like.device)


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """What ``register_hook`` put on a leaf (``Tensor._backward_hooks``)."""
    return list((parameter._backward_hooks or {}).values())


def accumulation_hooks(parameter: torch.Tensor) -> list[Any]:
    """What ``register_post_accumulate_grad_hook`` put on a leaf (``Tensor._post_accumulate_grad_hooks``)."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether there are hooks of either kind on a leaf."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let a leaf that takes another's place have its hooks; handles that remove them stay good."""
    new._backward_hooks = old._backward_hooks
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def module_hooks(module: torch.nn.Module) -> tuple[bool, bool]:
    """Whether a module has hooks that run in its forward pass, and hooks that run in backward."""
    return bool(module._forward_hooks or module._forward_pre_hooks), bool(
        module._backward_hooks or module._backward_pre_hooks
    )


def checkpoint_metadata_parts() -> tuple[Any, ...]:
    """The private pieces of a distributed checkpoint's metadata: an entry's place, a memory format, a layout by name."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
    from torch.serialization import _get_layout

    return _StorageInfo, _MEM_FORMAT_ENCODING, _get_layout


def is_operator(target: Any) -> bool:
    """Whether a node of an exported graph calls one overload of an operator (``torch._ops.OpOverload``)."""
    return isinstance(target, torch._ops.OpOverload)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to."""
    return tensor._version


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors lie in a tensor's storage (``torch._C._storage_Use_Count``; the look at it counts once more)."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


def owns_storage(tensor: torch.Tensor) -> bool:
    """Whether no other tensor lies in a tensor's storage (but what a view was made of) and none of its elements lies upon
    another."""
    return storage_users(tensor) <= 1 + tensor._is_view() and 0 not in tensor.stride()


@contextmanager
def sources_forgotten() -> Iterator[None]:
    """The texts of modules that ``torch.fx`` writes meanwhile are let go of (its loader, for tracebacks, keeps all of them
    for ever: some 100 kB for every capture of a small model)."""
    from torch.fx import graph_module

    kept = graph_module._loader.eval_cache
    with in_turn():
        before = set(kept)
        try:
            yield
        finally:
            for key in kept.keys() - before:
                del kept[key]
                linecache.cache.pop(key, None)


_TORCH = f"{Path(torch.__file__).parent}/"
_MACHINERY = tuple(_TORCH + part for part in ("_", "export/", "fx/", "library", "overrides", "utils/"))


class _Whereabouts:
    """What ``torch.fx`` asks where a node comes from: the frames of the model alone, without their source lines. All frames
    of a trace, some 80 of torch's own among them, take a tenth of the time of an export."""

    @staticmethod
    def extract() -> _Whereabouts:
        return _Whereabouts()

    def summary(self) -> traceback.StackSummary:
        found, frame = [], sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_MACHINERY) or code.co_filename == torch.__file__:
                found.append((code.co_filename, frame.f_lineno, code.co_name, ""))
            frame = frame.f_back  # type: ignore[assignment]  # None ends it
        return traceback.StackSummary.from_list(found[::-1])


@contextmanager
def short_traces() -> Iterator[None]:
    """Nodes that are traced meanwhile remember the frames of the model they come from, and no others."""
    from torch.fx import proxy

    if not hasattr(proxy, "CapturedTraceback"):
        yield
        return
    with in_turn(), mock.patch.object(proxy, "CapturedTraceback", _Whereabouts):
        yield


@contextmanager
def unwritten_modules() -> Iterator[None]:
    """Graph modules that are made meanwhile become Python text when they are called for the first time. Those of a capture
    never are, and writing them takes an eighth of the time of an export."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with in_turn(), _use_lazy_graph_module(True):
        yield


def traced_graph(function: Any, tensors: list[torch.Tensor], gradients: list[torch.Tensor], mode: Any) -> Any:
    """The operators that a function of two lists of fake tensors calls, below autograd, as an ``fx.Graph``."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with sources_forgotten(), unwritten_modules():
        return make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(tensors, gradients).graph


def plain_operators(function: Any, tensors: list[torch.Tensor]) -> Any:
    """What a function of a list of tensors that gives a list does for these shapes, below autograd and in the operators that
    inductor knows, as a module of the tensors."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad(), sources_forgotten():
        traced = make_fx(
            lambda *given: tuple(function(list(given))),
            decomposition_table=select_decomp_table(),
            tracing_mode="real",
            _allow_non_fake_inputs=True,
        )(*[mode.from_tensor(x.detach()) for x in tensors])
    if any(writes_in_place(n.target) for n in traced.graph.nodes if n.op == "call_function"):
        raise NotImplementedError("something is changed in place")
    return traced


def compiled_function(traced: Any) -> Any:
    """Inductor's code for what :func:`plain_operators` gave.

    It is called with a list, which it empties: a tensor that nobody else holds is freed after its last use.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    fakes = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
    mode = fakes[0].fake_mode
    with sources_forgotten(), V.set_fake_mode(mode), tracing(TracingContext(mode)):
        # Among other things, products whose sizes the fast kernels do not take are padded.
        joint = joint_graph_passes(traced)
        # Results lie in memory as the function's own do: what is padded inside is not seen outside.
        results = next(iter(reversed(joint.graph.nodes)))
        results.meta["user_visible_output_idxs"] = list(range(len(results.args[0])))
        return compile_fx_inner(joint, fakes)


def computes_cheaply(target: Any) -> bool:
    """Whether the compiler would rather perform an operator twice than keep what it gives, since it becomes part of a kernel
    that runs anyway: the list of its own partitioner, without random numbers."""
    return getattr(target, "overloadpacket", target) in _cheap_operators()


@functools.cache
def _cheap_operators() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list().recomputable_ops


def storage_of(x: torch.Tensor) -> int:
    """A number that tensors have in common that lie in one storage, those without data too."""
    return x.untyped_storage()._cdata


def is_view_operator(target: Any) -> bool:
    """Whether an operator only looks at its argument (``OpOverload.is_view``), or takes one of several results."""
    return bool(getattr(target, "is_view", False))


def communicates(target: Any) -> bool:
    """Whether an operator is a collective of PyTorch's own (``torch.ops._c10d_functional``)."""
    return getattr(target, "namespace", "") == "_c10d_functional"


def writes_in_place(target: Any) -> bool:
    """Whether an operator writes into an argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


class Allocation(NamedTuple):
    """What CUDA's caching allocator did: ``taken`` so many bytes at an address, or the bytes there became free."""

    taken: bool
    address: int
    size: int


class Segment(NamedTuple):
    """Memory that the caching allocator took from the device, and the stream for which it did."""

    address: int
    size: int
    stream: int


def allocations_are_recorded() -> bool:
    """Whether somebody records the one history of CUDA's allocator (``torch._C._cuda_isHistoryEnabled``)."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(enabled is not None and enabled())


def record_allocations(device: torch.device) -> None:
    """Record what CUDA's caching allocator does from now on (``torch.cuda.memory._record_memory_history``)."""
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", device=device)


def recorded_allocations(device: torch.device) -> list[Allocation]:
    """What was recorded; the recording ends (``torch.cuda.memory._snapshot``)."""
    traces = torch.cuda.memory._snapshot(device)["device_traces"]
    torch.cuda.memory._record_memory_history(None, device=device)
    kinds = {"alloc": True, "free_completed": False}
    number = torch.cuda.current_device() if device.index is None else device.index
    found = traces[number] if number < len(traces) else []
    return [Allocation(kinds[e["action"]], e["addr"], e["size"]) for e in found if e["action"] in kinds]


def pool_segments(device: torch.device, pool: Any) -> list[Segment]:
    """The segments of a pool of CUDA's memory (``torch.cuda.memory_snapshot``, whose entries move between versions)."""
    number = torch.cuda.current_device() if device.index is None else device.index
    return [
        Segment(s["address"], s["total_size"], s["stream"])
        for s in torch.cuda.memory_snapshot()
        if s["device"] == number and tuple(s.get("segment_pool_id", ())) == tuple(pool)
    ]


_FAILED_CAPTURES: list[Any] = []
"""Graphs whose capture did not end: PyTorch's allocators may ask them for ever which stream they belong to."""


def end_failed_capture(graph: Any, device: torch.device, pool: Any) -> None:
    """Where ``CUDAGraph.capture_end`` fails the allocator goes on as if the capture lasted (torch 2.13): end that too
    (``torch._C._cuda_endAllocateToPool``, which says so where there is nothing to end)."""
    _FAILED_CAPTURES.append(graph)
    number = torch.cuda.current_device() if device.index is None else device.index
    end, release = (getattr(torch._C, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
    if end is not None and release is not None:
        with contextlib.suppress(RuntimeError):
            end(number, pool)
            release(number, pool)


PACKING = torch._VF._pack_padded_sequence
"""What ``torch.nn.utils.rnn.pack_padded_sequence`` calls."""
