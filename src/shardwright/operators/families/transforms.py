"""Fourier transforms, linear algebra on matrices, distances, tensor products, histograms: opaque inside, free outside."""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import Expression, Opaque, Sum, TensorArgument, call, value
from shardwright.operators.record import describes, known
from shardwright.operators.samples import complexes, positive, reals

ALL = slice(None)


def _apart_from(x: TensorArgument, dims: Any) -> Any:
    inside = {d % x.rank for d in ([dims] if isinstance(dims, int) else dims)}
    return lambda *i: Opaque(x[tuple(ALL if d in inside else entry for d, entry in enumerate(i))])


@describes("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default", kind="other")
def fft_raw(x: TensorArgument, dims: Any) -> Any:
    return _apart_from(x, dims)


@describes(
    *(f"aten.fft_{name}.default" for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")),
    kind="other",
)
def fft(x: TensorArgument, n: Any, dim: int) -> Any:
    return _apart_from(x, dim)


@describes(
    *(f"aten.fft_{name}.default" for name in ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn")),
    kind="other",
)
def fft_several(x: TensorArgument, sizes: Any, dims: Any) -> Any:
    if dims is None:
        dims = range(x.rank) if sizes is None else range(x.rank - len(sizes), x.rank)
    return _apart_from(x, tuple(dims))


@describes("aten.fft_fftshift.default", "aten.fft_ifftshift.default", kind="copy")
def fft_shift(x: TensorArgument, dims: Any) -> Any:
    return _apart_from(x, range(x.rank) if dims is None else dims)


def _matrix(x: TensorArgument, i: tuple[Any, ...]) -> Expression:
    return x[(*i[: x.rank - 2], ALL, ALL)]


@describes(
    "aten.linalg_inv.default",
    "aten.inverse.default",
    "aten.linalg_cholesky.default",
    "aten.cholesky.default",
    "aten.linalg_det.default",
    "aten.det.default",
    "aten.logdet.default",
    "aten.linalg_matrix_exp.default",
    "aten.linalg_svdvals.default",
    "aten.linalg_eigvalsh.default",
    "aten.matrix_power.default",
    "aten.linalg_matrix_power.default",
    kind="other",
)
def matrix_function(x: TensorArgument) -> Any:
    return lambda *i: Opaque(_matrix(x, i))


@describes(
    "aten.linalg_qr.default",
    "aten.linalg_eigh.default",
    "aten.linalg_slogdet.default",
    "aten.slogdet.default",
    kind="other",
)
def matrix_pair(x: TensorArgument) -> Any:
    return (lambda *i: Opaque(_matrix(x, i)),) * 2


@describes("aten.linalg_svd.default", kind="other")
def matrix_triple(x: TensorArgument) -> Any:
    return (lambda *i: Opaque(_matrix(x, i)),) * 3


@describes("aten.cdist.default", "aten._cdist_forward.default", kind="other")
def cdist(a: TensorArgument, b: TensorArgument) -> Any:
    return lambda *n, i, j: Opaque(a.at((*n, i, ALL)), b.at((*n, j, ALL)))


@describes("aten.cosine_similarity.default", kind="normalisation")
def cosine_similarity(a: TensorArgument, b: TensorArgument, dim: int) -> Any:
    rank = max(a.rank, b.rank)
    at = dim % rank
    return lambda *i: Opaque(a.at((*i[:at], ALL, *i[at:])), b.at((*i[:at], ALL, *i[at:])))


@describes("aten.pairwise_distance.default", kind="normalisation")
def pairwise_distance(a: TensorArgument, b: TensorArgument, p: float, eps: float, keepdim: bool) -> Any:
    return lambda *i: Opaque(a.at((*(i[:-1] if keepdim else i), ALL)), b.at((*(i[:-1] if keepdim else i), ALL)))


@describes("aten.tensordot.default", kind="matmul")
def tensordot(a: TensorArgument, b: TensorArgument, dims_a: Any, dims_b: Any) -> Any:
    left = [d % a.rank for d in dims_a]
    right = [d % b.rank for d in dims_b]

    def element(*i: Any) -> Expression:
        def term(*k: Any) -> Expression:
            outer = iter(i)
            first = tuple(k[left.index(d)] if d in left else next(outer) for d in range(a.rank))
            second = tuple(k[right.index(d)] if d in right else next(outer) for d in range(b.rank))
            return a[first] * b[second]

        return Sum(lambda *k: term(*k), [a.shape[d] for d in left]) if left else term()

    return element


@describes("aten.meshgrid.indexing", "aten.meshgrid.default", kind="view")
def meshgrid(tensors: tuple[TensorArgument, ...], *, indexing: Any) -> Any:
    order = list(range(len(tensors)))
    if indexing == "xy" and len(order) > 1:
        order[0], order[1] = 1, 0
    return tuple(lambda *i, t=t, d=order[n]: t[(i[d],)] * 1 if t.rank else t[()] * 1 for n, t in enumerate(tensors))


@describes("aten.histc.default", kind="reduction")
def histc(x: TensorArgument, bins: int, low: float, high: float) -> Any:
    """With fixed borders every element falls into a bin of its own; without, they depend on all elements."""
    if low == high:
        return None
    return lambda b: Sum(lambda *k: call("falls", x[k], value(0)), x.shape)


@describes("aten.trace.default", kind="reduction")
def trace(x: TensorArgument) -> Any:
    return lambda: x[ALL, ALL] * 1


@describes("aten._weight_norm_interface.default", "aten._weight_norm.default", kind="normalisation")
def weight_norm(v: TensorArgument, g: TensorArgument, dim: int) -> Any:
    at = dim % v.rank
    alls = [ALL] * v.rank

    def slice_of(t: TensorArgument, entry: Any) -> Expression:
        index = list(alls)
        index[at] = entry
        return t[tuple(index)]

    weight = lambda *i: Opaque(slice_of(v, i[at]), slice_of(g, i[at]))
    return weight, lambda *i: Opaque(slice_of(v, i[at]))


known("aten._fft_c2c.default", samples=lambda a, b: [(complexes(a, b), (1,), 0, True)])
known("aten._fft_r2c.default", samples=lambda a, b: [(reals(a, b), (1,), 0, True)])
known("aten._fft_c2r.default", samples=lambda a, b: [(complexes(a, b), (1,), 0, 2 * b - 2)])
known(
    *(f"aten.fft_{name}.default" for name in ("fft", "ifft", "rfft", "irfft", "ihfft", "hfft")),
    samples=lambda a, b: [(reals(a, b), None, 0)],
)
known(
    *(f"aten.fft_{name}.default" for name in ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn")),
    samples=lambda a, b, c: [(reals(a, b, c), None, (-2, -1))],
)
known("aten.fft_fftshift.default", "aten.fft_ifftshift.default", samples=lambda a, b: [(reals(a, b), (1,))])
known(
    "aten.linalg_inv.default",
    "aten.inverse.default",
    "aten.linalg_det.default",
    "aten.det.default",
    "aten.linalg_matrix_exp.default",
    "aten.linalg_svdvals.default",
    "aten.linalg_slogdet.default",
    "aten.slogdet.default",
    "aten.linalg_qr.default",
    samples=lambda n: [(reals(n, 3, 3),)],
)
known("aten.matrix_power.default", "aten.linalg_matrix_power.default", samples=lambda n: [(reals(n, 3, 3), 2)])
known("aten.cdist.default", samples=lambda n, i, j, k: [(reals(n, i, k), reals(n, j, k))])
known("aten._cdist_forward.default", samples=lambda n, i, j, k: [(reals(n, i, k), reals(n, j, k), 2.0, None)])
known(
    "aten.cosine_similarity.default",
    samples=lambda a, b: [(reals(a, b), reals(a, b)), (reals(a, 1, b), reals(1, a, b), 2)],
)
known("aten.pairwise_distance.default", samples=lambda a, b: [(reals(a, b), reals(a, b))])
known("aten.tensordot.default", samples=lambda a, b, c, d: [(reals(a, b, c), reals(c, d, a), (2, 0), (0, 2))])
known(
    "aten.meshgrid.indexing",
    samples=lambda a, b: [([reals(a), reals(b)], {"indexing": "ij"}), ([reals(a), reals(b)], {"indexing": "xy"})],
)
known("aten.meshgrid.default", samples=lambda a, b: [([reals(a), reals(b)],)])
known("aten.trace.default", samples=lambda a, b: [(reals(a, b),)])
known("aten._weight_norm_interface.default", samples=lambda a, b: [(reals(a, b), reals(a, 1), 0)])

known("aten.histc.default", samples=lambda n: [(positive(n, grad=False), 5, 0, 1)])
