"""A strategy for PyTorch Lightning's ``Trainer`` whose ``LightningModule`` holds a parallelized module.

Every rank runs the ``Trainer`` of one device on the same batches, and only the module inside is split, so that loops,
callbacks and metrics hold as they stand. Checkpoints are those of one device too: whole tensors, written by the first rank,
so that Lightning without this strategy reads them; each rank takes its part of them again. (They pass through host memory
whole: for models that do not fit there, ``shardwright.runtime.checkpoint`` writes shards.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from shardwright.errors import RunError
from shardwright.runtime import ParallelModule
from shardwright.runtime.submodules import as_part
from shardwright.runtime.whole_state import whole_state


class ShardwrightStrategy(SingleDeviceStrategy):
    """For ``Trainer(strategy=ShardwrightStrategy(), accelerator="cpu", devices=1)``, the same on every rank.

    The process group is initialised and the model parallelized before the ``Trainer`` is made; shuffled data needs the same
    seed on every rank (``seed_everything``).

    Examples
    --------
    >>> module = MyLightningModule(shardwright.parallelize(model, plan))                        # doctest: +SKIP
    >>> Trainer(strategy=ShardwrightStrategy("cuda:0"), devices=1).fit(module, loader)          # doctest: +SKIP
    """

    strategy_name = "shardwright"

    def __init__(self, device: Any = "cpu", **kwargs: Any) -> None:
        if not dist.is_initialized():
            raise RunError(
                "torch.distributed is not initialised.",
                "Start with torchrun (or `shardwright run`) and call torch.distributed.init_process_group() first.",
            )
        super().__init__(device, **kwargs)
        self.global_rank = dist.get_rank()
        rank_zero_only.rank = self.global_rank  # where Lightning keeps it

    @property
    def is_global_zero(self) -> bool:
        return bool(self.global_rank == 0)

    def model_to_device(self) -> None:
        """It is where it belongs."""

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return whole_state(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """That of the optimizer of one device: whole tensors, of the parameters of all stages."""
        found, names = super().optimizer_state(optimizer), self._names(optimizer)
        own = [name for group in names for name in group]
        flat = {
            f"{own[number]} {key}": value for number, state in found["state"].items() for key, value in state.items()
        }
        merged = self._merged(names)
        place = {name: number for number, name in enumerate(name for group in merged for name in group)}
        states: dict[int, dict[str, Any]] = {}
        for known, value in whole_state(flat).items():
            name, _, key = known.rpartition(" ")
            states.setdefault(place[name], {})[key] = value
        groups = [
            {**group, "params": [place[name] for name in every]}
            for group, every in zip(found["param_groups"], merged, strict=True)
        ]
        return {**found, "state": dict(sorted(states.items())), "param_groups": groups}

    def _names(self, optimizer: Any) -> list[list[str]]:
        """The parameters of this rank in every group of an optimizer."""
        assert self.lightning_module is not None
        known = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        return [[known[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def _merged(self, own: list[list[str]]) -> list[list[str]]:
        """The same of all ranks, in the order of the model; every rank calls this."""
        assert self.lightning_module is not None
        order: dict[str, int] = {}
        for prefix, module in self.lightning_module.named_modules():
            if isinstance(module, ParallelModule):
                paths = (path for entry in module.graph.parameters for path in entry.paths)
                order |= {f"{prefix}.{path}": number for number, path in enumerate(paths)}
        every: list[list[list[str]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(every, own)
        merged = [
            list(dict.fromkeys(name for names in groups for name in names)) for groups in zip(*every, strict=True)
        ]
        alike = all(groups == own for groups in every)
        return merged if alike else [sorted(names, key=lambda name: order.get(name, -1)) for names in merged]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        dist.barrier()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = []
        for optimizer, known in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            names = self._names(optimizer)
            place = {name: number for number, name in enumerate(name for g in self._merged(names) for name in g)}
            own = [place[name] for group in names for name in group]
            state = {number: known["state"][whole] for number, whole in enumerate(own) if whole in known["state"]}
            groups, start = [], 0
            for group, mine in zip(known["param_groups"], names, strict=True):
                groups.append({**group, "params": list(range(start, start + len(mine)))})
                start += len(mine)
            states.append({**known, "state": state, "param_groups": groups})
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                state.update({name: as_part(value, parameter) for name, value in state.items()})
