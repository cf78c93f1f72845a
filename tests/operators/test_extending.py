"""User-defined descriptions: registered, checked, wrong ones caught, malformed ones refused with their line."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import DescriptionError
from shardwright.operators import analyse, describe
from shardwright.operators.language import Max, Sum
from shardwright.operators.rules import Partial, Shard, Window
from shardwright.verification.auditing import audit_call
from shardwright.verification.samples import concrete

pytestmark = pytest.mark.usefixtures("registry")


def loops(operator, *arguments):
    sample = concrete(operator, arguments)
    return analyse(sample.op, sample.tensors).by_name


def describe_energy():
    @describe("shardwright_tests::local_energy", kind="reduction")
    def local_energy(x, weight):
        return lambda b, t: Sum(lambda c: weight[c] * Sum(lambda r: x.padded((b, c, t + r - 1)), [3]))


def test_a_description_is_enough():
    describe_energy()
    x, weight = torch.randn(6, 5, 16), torch.randn(5)
    rules = loops("shardwright_tests.local_energy.default", x, weight)
    assert rules["b"].inputs[0] == Shard(0)
    assert rules["c"].inputs == (Shard(1), Shard(0)) and rules["c"].outputs == (Partial("sum"),)
    assert rules["t"].inputs[0] == Window(2, 1, -1, 1) and rules["t"].outputs == (Shard(1),)
    audit = audit_call("shardwright_tests::local_energy", x, weight)
    assert audit.disagreement is None and audit.runs >= 12


def test_described_operator_is_captured():
    from shardwright.frontend import capture

    describe_energy()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(5))

        def forward(self, x):
            return torch.ops.shardwright_tests.local_energy(x, self.weight).square().mean()

    graph = capture(Model(), (torch.randn(6, 5, 16),), {})
    op = next(op for op in graph.ops if op.target == "shardwright_tests.local_energy.default")
    assert {"b", "t", "c"} <= set(analyse(op, graph.tensors).by_name)


def test_two_swapped_indices_are_caught():
    @describe("shardwright_tests::product", kind="matmul")
    def product(a, b):
        return lambda i, j: Sum(lambda k: a[k, i] * b[k, j])  # right: a[i, k]

    found = audit_call("shardwright_tests::product", torch.randn(8, 8), torch.randn(8, 8)).disagreement
    assert found is not None and "shardwright_tests.product.default" in str(found) and "'i'" in str(found)
    assert "(8, 8)" in str(found)


def test_sum_where_max_is_right_is_caught():
    @describe("shardwright_tests::row_max", kind="reduction")
    def row_max(x):
        return lambda i: Sum(lambda k: x[i, k])  # right: Max

    found = audit_call("shardwright_tests::row_max", torch.randn(8, 6)).disagreement
    assert found is not None and "'k'" in str(found)


def test_max_is_accepted_where_it_is_right():
    @describe("shardwright_tests::row_max", kind="reduction")
    def row_max(x):
        return lambda i: Max(lambda k: x[i, k])

    assert audit_call("shardwright_tests::row_max", torch.randn(8, 6)).disagreement is None


def test_a_halo_one_too_short_is_caught():
    @describe("shardwright_tests::local_energy", kind="reduction")
    def local_energy(x, weight):
        return lambda b, t: Sum(lambda c: weight[c] * Sum(lambda r: x.padded((b, c, t + r - 1)), [2]))  # right: [3]

    found = audit_call("shardwright_tests::local_energy", torch.randn(6, 5, 16), torch.randn(5)).disagreement
    assert found is not None and "'t'" in str(found)


def product_of_indices(a, b):
    return lambda i, j: a[i * j, j]


def unbound_index(a, b):
    return lambda i, j: a[i, k]  # noqa: F821 - the mistake under test


def two_ranks(a, b):
    return lambda i, j: a[i, j] * a[i]


def leaked_index(a, b):
    kept = []

    def body(k):
        kept.append(k)
        return a[0, k]

    return lambda i, j: Sum(body) + a[i, kept[0]]


def bound_twice(a, b):
    return lambda i, j: Sum(lambda i: a[i, 0])


def not_indexed(a, b):
    return lambda i, j: a * 2


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (product_of_indices, "not affine"),
        (unbound_index, "'k' is not defined"),
        (two_ranks, "indexed with 2 indices in one place and with 1"),
        (leaked_index, "'k' is not bound"),
        (bound_twice, "bound twice"),
        (not_indexed, "a is used without indices"),
    ],
)
def test_malformed_descriptions_fail_when_registered(function, says):
    with pytest.raises(DescriptionError, match=says) as raised:
        describe("shardwright_tests::product", shapes=[(4, 4), (4, 4)] if function is not two_ranks else ())(function)
    line = raised.value.message.split(":")[1].split()[0]
    first = function.__code__.co_firstlineno
    assert __file__ in raised.value.message and first <= int(line) <= first + 8


def test_wrong_rank_with_example_shapes():
    def product(a, b):
        return lambda i, j: a[i, j, 0] * b[i, j]

    with pytest.raises(DescriptionError, match="a has 2 dims but is indexed with 3"):
        describe("shardwright_tests::product", shapes=[(4, 4), (4, 4)])(product)
