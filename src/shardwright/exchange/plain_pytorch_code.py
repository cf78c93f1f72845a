"""A plan as a ``parallelize.py``: one readable file on plain PyTorch, generated from the plan's own facts.

Only what the plan needs stands in the file (:mod:`shardwright.exchange.parallelize_text` has the sections): whole
replicas are ``DistributedDataParallel``, shards ``fully_shard``, hybrids the same on a mesh of two axes; features are
cut by the styles of ``parallelize_module``, with all activations as DTensors, so that a model's own code need not know
of it; stages of a pipeline run the model's own forward with the blocks of other stages skipped.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from shardwright.exchange import parallelize_text as text
from shardwright.exchange.configuration import Configuration, Remark
from shardwright.exchange.plain_pytorch import table
from shardwright.exchange.plain_pytorch_facts import SEQUENCE, Facts

WIDTH = 116


def program(c: Configuration, facts: Facts, title: str, lost: Sequence[Remark]) -> str:
    """The text of the file for a configuration of plain PyTorch.

    >>> c = Configuration("pytorch", devices=2, shard=2, batch=4, microbatch=2, microbatches=1)
    >>> print(program(c, Facts(blocks=("blocks.*",)), "gpt", ()).splitlines()[0])
    \"\"\"gpt on 2 devices: shard 2 (parameters), micro-batches of 2, 4 rows a step, float32, adamw.
    """
    here = "[(name, module) for name, module in found if not isinstance(module, Skipped | Unread)]"
    sections = [*_constants(c, facts), text.MESH.strip()]
    if not _alone(c) or facts.recomputed:
        sections.append(_filled(text.NAMED, found=here if c.pipeline > 1 else "found").strip())
    sections += [text.TIES.strip()] if facts.ties and _tensor(c) else []
    if _tensor(c):
        sections += [_features(facts).strip(), text.CONTEXT.strip()]
        sections += [text.SUMMED.strip()] if c.data == 1 else []
    if c.pipeline > 1:
        sections.append(_stage(c).strip())
        sections += [text.TIED_STAGES.strip()] if facts.tied else []
    whole = "loss.full_tensor() if isinstance(loss, DTensor) else loss" if _tensor(c) else "loss"
    sections += [_parallelize(c, facts), _filled(text.ROWS, whole=whole).strip(), _step(c, facts)]
    sections.append(_filled(text.MAIN, optimizer="SGD" if c.optimizer == "sgd" else "AdamW").strip())
    body = "\n\n\n".join(sections)
    return "\n".join([_docstring(c, title, lost), "", _imports(body), "", body, ""])


def _tensor(c: Configuration) -> bool:
    return (c.tensor or 1) > 1


def _alone(c: Configuration) -> bool:
    """Whether whole replicas are all there is."""
    return (c.shard or 1) == 1 and not _tensor(c) and c.pipeline == 1


def _filled(section: str, **values: str) -> str:
    for name, value in values.items():
        section = section.replace(f"<<{name}>>", value)
    assert "<<" not in section, section
    return section


def _docstring(c: Configuration, title: str, lost: Sequence[Remark]) -> str:
    said = textwrap.fill(f"{title} on {c.devices} devices: {c.summary()}.", WIDTH)
    lines = [
        '"""' + said.replace("\\", "/"),
        "",
        "Plain PyTorch, written by `shardwright export --to pytorch` and free of it. FUNCTION returns the model and its",
        "inputs with all rows of a step, (model, args) or (model, args, kwargs); the model returns its loss:",
        "",
        f"    torchrun --nproc-per-node {c.devices} parallelize.py FILE.py:FUNCTION",
        "",
        "Losses and gradients are averaged over ranks and micro-batches, which is right for a loss that is a mean over rows",
        "with equally many labels each.",
    ]
    if lost:
        lines += ["", "What the plan has, and this file does otherwise:"]
        for remark in lost:
            lines += textwrap.wrap(f"{remark}".replace("\\", "/"), WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "\n".join([*lines, '"""'])


MODULES = {
    "os": "import os",
    "re": "import re",
    "runpy": "import runpy",
    "sys": "import sys",
    "time": "import time",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
}
FROM = {
    "contextlib": ("contextmanager", "nullcontext"),
    "functools": ("partial",),
    "torch.distributed.device_mesh": ("init_device_mesh",),
    "torch.distributed.fsdp": ("fully_shard",),
    "torch.distributed.pipelining": ("PipelineStage", "Schedule1F1B", "ScheduleGPipe"),
    "torch.distributed.tensor": ("DTensor", "Replicate", "Shard", "distribute_tensor"),
    "torch.distributed.tensor.experimental": ("implicit_replication",),
    "torch.distributed.tensor.parallel": (
        "ColwiseParallel",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
        "parallelize_module",
    ),
    "torch.nn.attention": ("SDPBackend", "sdpa_kernel"),
    "torch.nn.parallel": ("DistributedDataParallel",),
    "torch.utils.checkpoint": ("checkpoint",),
}


def _imports(body: str) -> str:
    """Of all names the sections use, those that stand in this file."""
    words = set(re.findall(r"\b[A-Za-z_]\w*", body))
    plain = [line for name, line in MODULES.items() if name in words]
    for home, names in FROM.items():
        used = [name for name in names if name in words]
        plain += [f"from {home} import {', '.join(used)}"] if used else []
    plain = [line if len(line) <= WIDTH else _over_lines(line) for line in plain]
    library, torch = ([line for line in plain if ("torch" in line) == ours] for ours in (False, True))
    return "\n".join([*library, "", *torch])


def _over_lines(line: str) -> str:
    """A long import with a name in every line."""
    home, _, names = line.partition(" import ")
    return "\n".join([f"{home} import (", *(f"    {name}," for name in names.split(", ")), ")"])


def _constants(c: Configuration, facts: Facts) -> list[str]:
    """The degrees as a table that can be read back, and what the code knows of the model."""
    lines = [table(c), "", f"BATCH, MICROBATCHES = {c.batch}, {c.microbatches}"]
    if not _alone(c):
        lines.append(_assigned("BLOCKS", facts.blocks))
    if facts.recomputed:
        lines.append(_assigned("RECOMPUTED", facts.recomputed))
    if _tensor(c):
        lines += _styles(c, facts)
    if c.pipeline > 1:
        lines.append(_assigned("CUTS", facts.cuts))
        ranges = [f"range({first}, {last})" for first, last in facts.stages]
        lines.append("STAGES = (" + ", ".join(ranges) + ")  # which blocks each stage has")
        others = [f"    {name!r}: {stages!r}," for name, stages in facts.others]
        lines += ["OTHERS = {  # modules outside the blocks, and the stages that read them", *others, "}"]
        lines.append(f"HIDDEN = {facts.hidden!r}  # what a micro-batch hands from stage to stage")
        if facts.tied:
            lines.append(_assigned("TIED", facts.tied))
    return ["\n".join(lines).replace("'", '"')]  # as formatters have it; no name has a quote in it


def _assigned(name: str, values: Iterable[object]) -> str:
    values = tuple(values)
    line = f"{name} = {values!r}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name} = (", *(f"    {value!r}," for value in values), ")"])


def _styles(c: Configuration, facts: Facts) -> list[str]:
    """The styles of modules; rows of products leave what they make cut along the sequence where norms are."""
    layout = f"output_layouts=Shard({facts.sequence_dim}), " if c.sequence else ""
    lines = ["STYLES = {"]
    for name, style in facts.styles:
        if style == SEQUENCE:
            dim = f"sequence_dim={facts.sequence_dim}, " if facts.sequence_dim != 1 else ""
            lines.append(f"    {name!r}: {style}({dim}use_local_output=False),")
        else:
            extra = layout if style == "RowwiseParallel" else ""
            lines.append(f"    {name!r}: {style}({extra}use_local_output=False),")
    lines.append("}")
    if facts.gathered:
        lines.append(_assigned("GATHERED", facts.gathered))
    if facts.placed:
        lines += ["PLACED = {", *(f"    {name!r}: Shard({dim})," for name, dim in facts.placed), "}"]
    return lines


def _features(facts: Facts) -> str:
    gathered = _filled(text.GATHERED, sequence_dim=str(facts.sequence_dim)) if facts.gathered else ""
    before, after = ("    tied = ties(model)\n", text.RETIE) if facts.ties else ("", "")
    placed = text.PLACED if facts.placed else text.WHOLE
    return _filled(text.FEATURES, before=before, gathered=gathered, placed=placed, after=after)


def _stage(c: Configuration) -> str:
    if not _tensor(c):
        return _filled(
            text.STAGE, received="received[0]", loss="loss_of(self.model(*args, **kwargs))", sent="sent.args[0]"
        )
    received = "DTensor.from_local(received[0], self.mesh, [Replicate()], run_check=False)"
    sent = "sent.args[0].full_tensor() if isinstance(sent.args[0], DTensor) else sent.args[0]"
    found = _filled(text.STAGE, received=received, loss="loss_of(self.model(*args, **kwargs))", sent=sent)
    return found.replace("def __init__(self, model, number):", "def __init__(self, model, number, mesh):").replace(
        "self.model, self.received, self.rows = model, None, []",
        "self.model, self.mesh, self.received, self.rows = model, mesh, None, []",
    )


def _parallelize(c: Configuration, facts: Facts) -> str:
    """The function that the file is about."""
    pipeline, tensor = c.pipeline > 1, _tensor(c)
    lines = ["def parallelize(model, mesh):"]
    does = "this rank's stage of the model" if pipeline else "the model"
    lines.append(f'    """Make {does} parallel: every rank calls it with the same whole model."""')
    lines += [f"    model = model.to(torch.{c.precision})"] if c.precision != "float32" else []
    if pipeline:
        lines.append('    number = mesh["pipeline"].get_local_rank()')
        lines.append("    stage = Stage(model, number" + (', mesh["tensor"])' if tensor else ")"))
    lines += ['    cut_features(model, mesh["tensor"])'] if tensor else []
    if facts.recomputed:
        lines += [
            "    for _, block in named(model, RECOMPUTED):",
            "        block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        ]
    root = "stage" if pipeline else "model"
    if c.data > 1 and _alone(c):
        unread = ", find_unused_parameters=True" if facts.unread else ""
        lines += [
            '    ids = None if mesh.device_type == "cpu" else [torch.cuda.current_device()]',
            f'    return DistributedDataParallel(model, device_ids=ids, process_group=mesh.get_group("replicate"){unread})',
        ]
        return "\n".join(lines)
    if c.data > 1:
        axes = '"replicate", "shard"' if (c.replicate or 1) > 1 else '"shard"'
        lines += (
            [
                f"    data = mesh[{axes}]",
                "    for _, block in named(model, BLOCKS):",
                f"        fully_shard(block, mesh=data, reshard_after_forward={c.reshard})",
                f"    fully_shard({root}, mesh=data, reshard_after_forward=False)",
            ]
            if facts.blocks
            else [f"    data = mesh[{axes}]", f"    fully_shard({root}, mesh=data, reshard_after_forward={c.reshard})"]
        )
    elif tensor:
        lines += _filled(text.WHOLE_GRADIENTS, module=root).rstrip().splitlines()
    if pipeline:
        schedule = "ScheduleGPipe" if c.schedule == "gpipe" else "Schedule1F1B"
        lines += [
            '    meta = {"dtype": next(model.parameters()).dtype, "device": "meta", "requires_grad": True}',
            "    hidden, loss = torch.empty(HIDDEN, **meta), torch.empty(1, **meta)",
            "    part = PipelineStage(",
            f'        stage, number, {c.pipeline}, torch.device(mesh.device_type), group=mesh.get_group("pipeline"),',
            "        input_args=(hidden,) if number else (), output_args=(hidden if number < len(CUTS) else loss,),",
            "    )",
            f"    stage.schedule = {schedule}(part, MICROBATCHES, loss_fn=lambda loss, _: loss.mean())",
        ]
    return "\n".join([*lines, f"    return {root}"])


def _step(c: Configuration, facts: Facts) -> str:
    count = c.microbatches or 1
    if c.pipeline > 1:
        indent = "        " if _tensor(c) else "    "
        run = ["    with cut_operators(mesh):"] if _tensor(c) else []
        run.append(f"{indent}stage.schedule.step(number=numbers, target=numbers, losses=losses)")
        run += ["    add_tied(stage, mesh)"] if facts.tied else []
        return _filled(text.STEP_OF_STAGE, run="\n".join(run) + "\n").strip()
    each, batches = "args, kwargs", "rows(mesh, args, kwargs)"
    lines = []
    indent = "        "
    if count > 1 and c.data > 1:
        each, batches = "number, (args, kwargs)", "enumerate(rows(mesh, args, kwargs), start=1)"
        if _alone(c):
            lines.append(f"{indent}with nullcontext() if number == MICROBATCHES else model.no_sync():")
            indent += "    "
        else:
            lines.append(f"{indent}model.set_requires_gradient_sync(number == MICROBATCHES)")
    if _tensor(c):
        lines.append(f"{indent}with cut_operators(mesh):")
        indent += "    "
    lines += [
        f"{indent}loss = loss_of(model(*args, **kwargs)) / MICROBATCHES",
        f"{indent}loss.backward()",
        "        total = total + loss.detach()",
    ]
    return _filled(text.STEP, each=each, batches=batches, loop="\n".join(lines) + "\n").strip()
