"""A batch norm cut over its batch, with a backward of its own, against PyTorch's over the whole batch."""

from __future__ import annotations

import threading

import torch
from torch.nn.functional import batch_norm

from shardwright.operators.families.statistics import normalised

EPS = 1e-5


def in_pieces(x, gradient, weight, bias, cuts):
    """Every piece in a thread with a graph of its own; sums meet at a barrier, also those of the backward pass."""
    barrier, held = threading.Barrier(len(cuts)), [None] * len(cuts)
    answers = [None] * len(cuts)
    parts = list(zip(x.split(cuts), gradient.split(cuts), strict=True))

    def work(rank):
        def summed(part):
            held[rank] = part
            barrier.wait(30)
            total = torch.stack(held).sum(0)
            barrier.wait(30)
            return total

        leaves = [t.detach().clone().requires_grad_() for t in (parts[rank][0], weight, bias)]
        arguments = dict(zip(("input", "weight", "bias"), leaves, strict=True), eps=EPS)
        normal, mean, variance = normalised(arguments, [0, 2, 3], x.numel() // x.shape[1], summed, plain=False)
        normal.backward(parts[rank][1])
        answers[rank] = normal.detach(), mean, variance, *(leaf.grad for leaf in leaves)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(cuts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(zip(*answers, strict=True))


def test_a_cut_batch_norm_is_the_whole_one_forward_and_backward():
    torch.manual_seed(0)
    x = (3 + torch.randn(8, 3, 4, 4, dtype=torch.float64)).requires_grad_()
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gradient = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    whole = batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    whole.backward(gradient)
    normal, mean, variance, of_x, of_weight, of_bias = in_pieces(x.detach(), gradient, weight, bias, [5, 3])
    close = torch.testing.assert_close
    close(torch.cat(normal), whole.detach())
    close(mean[1].flatten(), x.detach().mean((0, 2, 3)))
    close(variance[1].flatten(), x.detach().var((0, 2, 3), correction=0))
    close(torch.cat(of_x), x.grad)
    close(sum(of_weight), weight.grad)
    close(sum(of_bias), bias.grad)
