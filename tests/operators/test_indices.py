"""Index arithmetic: simplification never changes a value, intervals hold exactly what a piece reads."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.operators.indices import Affine, Loop, Quotient, affine, bounds
from shardwright.operators.regions import Coarser, interval, region


def evaluate(index: Affine, values: dict[str, int]) -> int:
    total = index.constant
    for atom, coefficient in index.terms:
        if isinstance(atom, Loop):
            value = values[atom.name]
        elif isinstance(atom, Quotient):
            value = evaluate(atom.of, values) // atom.by
        else:
            value = evaluate(atom.of, values) % atom.by
        total += coefficient * value
    return total


@st.composite
def formulas(draw):
    """A random index as symbols and as a plain function of the loops' values."""
    loops = [Loop(name, draw(st.integers(1, 6))) for name in "ijk"]
    symbol, plain = affine(0), lambda v: 0
    for loop in loops:
        c = draw(st.sampled_from([0, 1, 1, 2, 3, 4, 6, 12]))
        symbol, plain = symbol + loop * c, (lambda v, p=plain, n=loop.name, c=c: p(v) + v[n] * c)
    constant = draw(st.integers(0, 5))
    symbol, plain = symbol + constant, (lambda v, p=plain, c=constant: p(v) + c)
    for _ in range(draw(st.integers(0, 2))):
        by = draw(st.integers(1, 12))
        if draw(st.booleans()):
            symbol, plain = symbol // by, (lambda v, p=plain, b=by: p(v) // b)
        else:
            symbol, plain = symbol % by, (lambda v, p=plain, b=by: p(v) % b)
    return loops, symbol, plain


def points(loops):
    for values in itertools.product(*(range(loop.extent) for loop in loops)):
        yield dict(zip((loop.name for loop in loops), values, strict=True))


@settings(max_examples=300, deadline=None)
@given(formulas())
def test_simplified_indices_keep_their_value(formula):
    loops, symbol, plain = formula
    low, high = bounds(symbol)
    for values in points(loops):
        assert evaluate(symbol, values) == plain(values)
        assert low <= plain(values) <= high


@settings(max_examples=300, deadline=None)
@given(formulas(), st.data())
def test_intervals_contain_what_a_piece_reads(formula, data):
    loops, symbol, plain = formula
    cut = next((loop for loop in loops if loop.extent > 1), None)
    if cut is None:
        return
    unit = 1
    while True:
        try:
            found = interval(symbol, frozenset({cut.name}), unit)
            break
        except Coarser as request:
            assert request.unit > unit
            unit = request.unit
    if found is None or cut.extent % unit:
        return
    start = data.draw(st.integers(0, cut.extent // unit - 1))
    stop = data.draw(st.integers(start + 1, cut.extent // unit))
    read = [plain(v) for v in points(loops) if start * unit <= v[cut.name] < stop * unit]
    assert found.slope * start + found.low <= min(read)
    assert max(read) <= found.slope * stop + found.high


def test_reshape_indices_become_what_a_person_would_write():
    i, j = Loop("i", 6), Loop("j", 12)
    assert (i * 12 + j) // 12 == affine(i)
    assert (i * 12 + j) % 12 == affine(j)
    assert (i * 12 + j) // 24 == i // 2
    assert (i * 12 + j) % 24 == (i % 2) * 12 + j


def test_regions_of_a_convolution_a_patch_and_a_slice():
    y, r = Loop("y", 16), Loop("r", 3)
    cut = frozenset({"y"})
    window = region(y + r - 1, cut, 1, 16, 16)
    assert (window.kind, window.scale, window.low, window.high) == ("window", 1, -1, 1)
    patch = region(y * 4 + Loop("p", 4), cut, 1, 16, 64)
    assert patch.kind == "shard" and patch.tiled
    assert region(y + 9, cut, 1, 16, 25).kind == "whole"  # a far slice is not a halo
    assert region(affine(r), cut, 1, 16, 3) is None
