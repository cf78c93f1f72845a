"""``fits``: whether a model can be trained on a cluster, what takes the memory, and what to change where it does not fit.

Every line of the answer, a usual way or a change of one, is a configuration whose program is replayed by the account that
judges plans (:func:`~shardwright.fitting.account.account`). Changes are tried from the cheapest kind on: each alone, then,
while none fits, the one that takes least together with one further change. They are listed by the predicted step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any

from shardwright.cluster import Cluster, parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.exchange import Configuration
from shardwright.fitting.account import Account, account, taken
from shardwright.fitting.engines import of_one_rank, shorter_rows
from shardwright.fitting.ways import MASTERS, compiled_way, in_mixed_precision, named_way, single_changes, usual_ways
from shardwright.graph import Graph
from shardwright.planner import Options, Progress
from shardwright.planner.sizing import resized
from shardwright.program.microbatches import batch_of
from shardwright.search.limits import limit_of

CHANGES_IN_A_ROW = 3
"""Changes that are made together at most."""

LISTED = 6
"""Changes that fit are looked for until there are so many."""


@dataclass(frozen=True)
class Fit:
    """One way to train: what a device must have of at most ``limit`` bytes, by kind, and the predicted step.

    ``bytes`` is what it takes at its worst moment (``during``), and ``kinds`` what that is made of; ``refusal`` says why
    there is no such way here. ``devices`` are those it runs on.
    """

    name: str
    configuration: Configuration
    devices: int
    limit: float
    bytes: float = inf
    seconds: float = inf
    kinds: tuple[tuple[str, float], ...] = ()
    during: str = ""
    refusal: str = ""
    reserved: float | None = None
    """What PyTorch's allocator takes from the device where there is room; told of another engine's file alone."""

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit

    @property
    def headroom(self) -> float:
        """Bytes that are left; negative where they are missing."""
        return self.limit - self.bytes

    def kind(self, *names: str) -> float:
        """Bytes of these kinds."""
        return sum(size for name, size in self.kinds if name in names)


@dataclass(frozen=True)
class Change:
    """What to change (``what``, one thing or several), what that leads to, and what it costs: seconds of a step more, as a
    share. ``otherwise``: what would be computed otherwise."""

    what: tuple[str, ...]
    fit: Fit
    slower: float
    otherwise: str = ""


@dataclass(frozen=True)
class Fitting:
    """The answer. ``reserves`` are the bytes of a device's ``memory`` that no way may use, and for what; ``ways`` the usual
    ones (the asked one first); ``changes`` what makes the first fit, by what it costs; ``fewest`` the smallest number of
    devices on which the cheapest way that fits still does."""

    model: str
    cluster: str
    device: str
    devices: int
    batch: int
    memory: float
    reserves: tuple[tuple[str, float], ...]
    limit: float
    ways: tuple[Fit, ...]
    asked: bool
    changes: tuple[Change, ...]
    fewest: Fit | None
    calibration: str
    seconds: float
    captured_seconds: float = 0.0
    ring: int = 1
    """So many ranks share every sequence of ``batch`` rows, which are parts of sequences then."""

    @property
    def best(self) -> Fit | None:
        """The fastest way that fits: of those that were asked about, else of the usual ones, else of the changes."""
        asked = [fit for fit in self.ways[:1] if self.asked and fit.fits]
        found = asked or [fit for fit in self.ways if fit.fits] or [change.fit for change in self.changes]
        return min(found, key=lambda fit: fit.seconds, default=None)

    @property
    def fits(self) -> bool:
        """Whether what was asked about fits; any of the usual ways, where none was named."""
        return self.ways[0].fits if self.asked else any(fit.fits for fit in self.ways)


def fits(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str,
    like: str | Configuration | None = None,
    search: str | None = None,
    optimizer: str = "adamw",
    memory_limit: float | None = None,
    progress: Progress | None = None,
    reference: str = "",
    compiled: bool = False,
) -> Fitting:
    """Whether ``model`` can be trained on ``cluster``, and what to change where it does not fit.

    Parameters
    ----------
    model, args, kwargs
        The unmodified module and one batch for all devices together (on the meta device if it is large).
    cluster
        A :class:`Cluster` or its name: ``"8xH100"``, ``"4x8xA100-80GB"``, a TOML file.
    like
        Another engine's configuration: a file, or what :func:`~shardwright.exchange.read_configuration` made of it.
    search
        One of the usual ways by name, to ask about that one: ``data-parallel``, ``zero-1``, ``zero-2``, ``fsdp``,
        ``megatron``, ``fsdp+tensor``.
    optimizer
        ``adamw``, ``sgd``, ``momentum``, or ``adamw-float32`` for mixed precision.
    compiled
        Whether the step is compiled (``parallel.compile()``, ``torch.compile``): it keeps less for its backward pass.

    Examples
    --------
    >>> import torch
    >>> with torch.device("meta"):
    ...     model, x = torch.nn.Linear(1024, 1024), torch.empty(64, 1024)
    >>> answer = fits(model, (x,), cluster="2xH100")
    >>> answer.fits, [way.name for way in answer.ways][:2]
    (True, ['data-parallel', 'zero-1'])
    """
    from shardwright.exchange import read_configuration
    from shardwright.frontend import capture

    where = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    told = read_configuration(like, reference) if isinstance(like, str) else like
    told, args, kwargs, ring = as_one_rank(told, args, kwargs or {})
    began = perf_counter()
    graph = capture(model, args, kwargs)
    seconds = perf_counter() - began
    options = Options(optimizer=optimizer, memory_limit=memory_limit)
    found = fits_graph(
        graph,
        where,
        options,
        like=told,
        search=search,
        progress=progress,
        reference=reference,
        ring=ring,
        compiled=compiled,
    )
    return replace(found, captured_seconds=seconds)


def as_one_rank(
    like: Configuration | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Configuration | None, tuple[Any, ...], Mapping[str, Any], int]:
    """The question about one rank of those that share a sequence, with its batch and their number; as it is where none do,
    or where the batch cannot be cut so."""
    own, ring = of_one_rank(like) if like is not None else (None, 1)
    rows = shorter_rows(args, kwargs, ring) if ring > 1 else None
    return (like, args, kwargs, 1) if rows is None else (own, *rows, ring)


def fits_graph(
    graph: Graph,
    cluster: Cluster,
    options: Options | None = None,
    *,
    like: Configuration | None = None,
    search: str | None = None,
    progress: Progress | None = None,
    reference: str = "",
    ring: int = 1,
    compiled: bool = False,
) -> Fitting:
    """The same of a captured graph. ``ring``: so many ranks share a sequence, of which its rows are parts and ``like`` is
    what one of them is asked about (:func:`~shardwright.fitting.engines.of_one_rank`).

    >>> fits_graph(graph, parse_cluster("8xH100"), search="fsdp").ways[0].headroom               # doctest: +SKIP
    """
    began, options = perf_counter(), options or Options()
    if like is not None and search is not None:
        raise ShardwrightError("A file and the name of a way are two questions.", "Leave out one of them.")
    ask = _Asking(graph, cluster, options, progress or (lambda text: None), ring)
    ways = usual_ways(cluster, batch_of(graph), options.optimizer)
    named = {search: named_way(search, cluster, batch_of(graph), options.optimizer)} if search else {}
    if like is not None:
        named = {like.source or like.engine: in_mixed_precision(like)}
    if compiled:
        ways, named = ({name: compiled_way(c) for name, c in of.items()} for of in (ways, named))
    found = tuple(ask.about(name, c, cluster) for name, c in (named or ways).items())
    if like is not None:
        found = tuple(map(ask.with_reserved, found))
    changes, fewest = ask.changes(found, bool(named)), None
    if named:
        beside = {name: replace(c, optimizer=found[0].configuration.optimizer) for name, c in ways.items()}
        found += tuple(ask.about(name, c, cluster) for name, c in beside.items() if name != search)
    elif not changes:
        fewest = ask.fewest(min((fit for fit in found if fit.fits), key=lambda fit: fit.seconds, default=None))
    device = cluster.device
    return Fitting(
        model=reference,
        cluster=cluster.name,
        device=device.name,
        devices=cluster.size,
        batch=batch_of(graph),
        memory=float(device.memory),
        reserves=tuple((who, float(taken)) for who, taken in device.reserves),
        limit=limit_of(device, options.memory_limit),
        ways=found,
        asked=bool(named),
        changes=tuple(changes),
        fewest=fewest,
        calibration=cluster.calibration,
        seconds=perf_counter() - began,
        ring=ring,
    )


class _Asking:
    """Accounts of one graph, each made once."""

    def __init__(self, graph: Graph, cluster: Cluster, options: Options, say: Progress, ring: int) -> None:
        self.graph, self.cluster, self.options, self.say, self.ring = graph, cluster, options, say, ring
        self.limit = limit_of(cluster.device, options.memory_limit)
        self.known: dict[tuple[str, str], Account | str] = {}

    def about(self, name: str, c: Configuration, cluster: Cluster) -> Fit:
        """A way in full, or why there is none."""
        try:
            settled = c.on(cluster.size, batch_of(self.graph))
        except ShardwrightError as error:
            return Fit(name, c, cluster.size, self.limit, refusal=error.message)
        key = cluster.name, repr(sorted(settled.decisions().items()))
        if key not in self.known:
            self.say(name)
            try:
                self.known[key] = account(self.graph, cluster, settled, self.options, ring=self.ring)
            except ShardwrightError as error:
                self.known[key] = error.message
        told = self.known[key]
        if isinstance(told, str):
            return Fit(name, settled, cluster.size, self.limit, refusal=told)
        return Fit(name, settled, cluster.size, self.limit, told.bytes, told.seconds, told.kinds, told.during)

    def with_reserved(self, fit: Fit) -> Fit:
        """The same way with what the allocator reserves."""
        if fit.refusal:
            return fit
        most = taken(self.graph, self.cluster, fit.configuration, self.options, ring=self.ring)
        return replace(fit, reserved=max(most, fit.bytes))

    def changes(self, ways: tuple[Fit, ...], asked: bool) -> list[Change]:
        """What makes a way fit, by the step it leads to: of the one that was asked about, or, where no usual way fits, of
        the one that takes least."""
        possible = [fit for fit in ways if not fit.refusal]
        if not possible or any(fit.fits for fit in possible):
            return []
        first = possible[0] if asked else min(possible, key=lambda fit: fit.bytes)
        found = list[Change]()
        start: tuple[Fit, tuple[str, ...]] = first, ()
        for _ in range(CHANGES_IN_A_ROW):
            tried = [*self._tried(first, *start)]
            found += [change for change in tried if change.fit.fits]
            if found or not tried:
                break
            least = min(tried, key=lambda change: change.fit.bytes)
            if least.fit.bytes >= start[0].bytes:
                break
            start = least.fit, least.what
        found += [change for change in self._elsewhere(first, *start) if change.fit.fits]
        return sorted(found, key=lambda change: (change.fit.seconds * change.fit.devices, bool(change.otherwise)))

    def _tried(self, first: Fit, base: Fit, before: tuple[str, ...]) -> Iterator[Change]:
        """Every single change of a way; not more micro-batches or more tensor parallelism once fewer fit."""
        satisfied = set[str]()
        for what, c in single_changes(base.configuration, self.cluster):
            kind = "micro-batches" if "micro-batches" in what else "tensor" if "tensor" in what else what
            if kind in satisfied:
                continue
            fit = self.about(what, c, self.cluster)
            if fit.refusal:
                continue
            if fit.fits:
                satisfied.add(kind)
            yield Change((*before, what), fit, fit.seconds / first.seconds - 1)

    def _elsewhere(self, first: Fit, base: Fit, before: tuple[str, ...]) -> Iterator[Change]:
        """The same on twice and four times the devices, and with optimizer state in half precision."""
        c = base.configuration
        if c.optimizer == MASTERS:
            fit = self.about("", replace(c, optimizer="adamw"), self.cluster)
            what = "parameters and optimizer state in half precision"
            yield Change((*before, what), fit, fit.seconds / first.seconds - 1, "the update rounds to half precision")
        for factor in (2, 4):
            grown = "shard" if (c.shard or 1) > 1 or (c.replicate or 1) == 1 else "replicate"
            more: dict[str, Any] = {grown: (getattr(c, grown) or 1) * factor}
            try:
                cluster = resized(self.cluster, factor * self.cluster.size)
            except ShardwrightError:
                return
            fit = self.about("", replace(c, **more, devices=None, microbatch=None, cuts=()), cluster)
            if fit.refusal:
                continue
            yield Change((*before, f"{cluster.size} devices"), fit, fit.seconds / first.seconds - 1)
            if fit.fits:
                return

    def fewest(self, best: Fit | None) -> Fit | None:
        """The fewest devices, halved again and again, on which a way still fits."""
        smallest, devices = None, self.cluster.size // 2
        while best is not None and devices >= 1 and self.cluster.size % devices == 0:
            try:
                cluster = resized(self.cluster, devices)
                ways = usual_ways(cluster, batch_of(self.graph), self.options.optimizer)
                c = ways.get(best.name, next(iter(ways.values())))
            except ShardwrightError:
                break
            fit = self.about(best.name, c, cluster)
            if not fit.fits:
                break
            smallest, devices = fit, devices // 2
        return smallest
