"""Models of sets, graphs and tables: scatter, gather, pairs, routes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.frontend.various.registry import ROWS, Built, named
from torch import Tensor, nn


class GraphNetwork(nn.Module):
    """Messages along edges, summed at their ends with ``index_add`` and ``scatter_reduce``."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(24, 16), nn.GRUCell(32, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        source, target = edges
        for _ in range(2):
            message = F.relu(self.message(torch.cat([nodes[source], nodes[target], features], 1)))
            total = torch.zeros(len(nodes), 16, dtype=nodes.dtype).index_add(0, target, message)
            index = target[:, None].expand_as(message)
            largest = torch.zeros_like(total).scatter_reduce(0, index, message, "amax", include_self=True)
            nodes = self.update(torch.cat([total, largest], 1), nodes)
        return F.cross_entropy(self.head(nodes), labels)


@named
def graph_network() -> Built:
    edges = torch.randint(0, 12, (2, 40))
    return GraphNetwork(), (torch.randn(12, 8), edges, torch.randn(40, 8), torch.randint(0, 3, (12,))), {}


class GraphAttention(nn.Module):
    """Attention over a dense adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.left, self.right = nn.Linear(8, 16, bias=False), nn.Linear(16, 1), nn.Linear(16, 1)
        self.head = nn.Linear(16, 3)

    def forward(self, nodes: Tensor, adjacency: Tensor, labels: Tensor) -> Tensor:
        h = self.project(nodes)
        scores = F.leaky_relu(self.left(h) + self.right(h).transpose(-1, -2), 0.2)
        weights = scores.masked_fill(~adjacency, float("-inf")).softmax(-1)
        return F.cross_entropy(self.head(F.elu(weights @ h)).flatten(0, 1), labels.flatten())


@named
def graph_attention() -> Built:
    adjacency = (torch.rand(ROWS, 10, 10) > 0.5) | torch.eye(10, dtype=torch.bool)
    return GraphAttention(), (torch.randn(ROWS, 10, 8), adjacency, torch.randint(0, 3, (ROWS, 10))), {}


class PointNet(nn.Module):
    """Points transformed by a predicted matrix, each by itself, then their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU())
        self.matrix, self.points, self.head = nn.Linear(8, 9), nn.Conv1d(3, 16, 1), nn.Linear(16, 4)

    def forward(self, cloud: Tensor, labels: Tensor) -> Tensor:
        matrix = self.matrix(self.align(cloud).amax(-1)).view(-1, 3, 3) + torch.eye(3, dtype=cloud.dtype)
        features = F.relu(self.points(matrix @ cloud)).amax(-1)
        regular = (matrix @ matrix.mT - torch.eye(3, dtype=cloud.dtype)).pow(2).sum((1, 2)).mean()
        return F.nll_loss(self.head(features).log_softmax(-1), labels) + 0.01 * regular


@named
def point_net() -> Built:
    return PointNet(), (torch.randn(ROWS, 3, 12), torch.randint(0, 4, (ROWS,))), {}


class Recommender(nn.Module):
    """Large embedding tables (one summed over bags), dense features, pairwise products: DLRM's form."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 8) for rows in (1000, 500, 37))
        self.history = nn.EmbeddingBag(1000, 8, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, kinds: Tensor, history: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x, self.history(history), *(table(kinds[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        i, j = torch.triu_indices(5, 5, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, i, j]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products], 1)).squeeze(1), clicked)


@named
def recommender() -> Built:
    kinds = torch.stack([torch.randint(0, n, (ROWS,)) for n in (1000, 500, 37)], 1)
    clicked = torch.randint(0, 2, (ROWS,)).float()
    return Recommender(), (torch.randn(ROWS, 5), kinds, torch.randint(0, 1000, (ROWS, 6)), clicked), {}


class Contrastive(nn.Module):
    """Two towers and a temperature; every row is compared with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.EmbeddingBag(40, 8, mode="mean")
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        one, other = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits = one @ other.T * self.temperature.exp()
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@named
def contrastive() -> Built:
    return Contrastive(), (torch.randn(ROWS, 12), torch.randint(0, 40, (ROWS, 5))), {}


class Router(nn.Module):
    """A mixture of experts that picks out each expert's rows: how many there are is known only from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).squeeze(1)
            found = found.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return found


@named
def router() -> Built:
    return Router(), (torch.randn(10, 8),), {}
