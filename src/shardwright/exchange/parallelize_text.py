"""The sections of a ``parallelize.py``: plain PyTorch, of which a plan takes those that it needs.

They are put together by :mod:`shardwright.exchange.plain_pytorch_code`, which fills in what stands in double angle
brackets. Everything rests on documented interfaces of ``torch.distributed``: ``fully_shard``, ``parallelize_module`` and
its styles, ``PipelineStage`` and its schedules, ``DistributedDataParallel``.
"""

MESH = '''
def device_mesh():
    """An axis for every degree, the slowest link first."""
    names = ("pipeline", "replicate", "shard", "tensor")
    sizes = tuple(PARALLELISM.get(name, 1) for name in names)
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", sizes, mesh_dim_names=names)
'''

NAMED = '''
def called(name, pattern):
    """Whether this is a name of that pattern, in which * stands for a number."""
    return re.fullmatch(re.escape(pattern).replace(r"\\*", r"\\d+"), name) is not None


def named(model, patterns):
    """The modules with such names."""
    found = [(name, module) for name, module in model.named_modules() if any(called(name, p) for p in patterns)]
    return <<found>>
'''

TIES = '''
def ties(model):
    """Names under which a parameter stands more than once."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [found for found in names.values() if len(found) > 1]
'''

FEATURES = '''
def cut_features(model, mesh):
    """Weights cut along the tensor axis as the plan has them, all others whole on it; activations follow by DTensor."""
<<before>>    for pattern, style in STYLES.items():
        for _, module in named(model, [pattern]):
            parallelize_module(module, mesh, style, src_data_rank=None)
<<gathered>>    whole = {}
    for name, module in model.named_modules():
        for leaf, old in list(module.named_parameters(recurse=False)):
            if not isinstance(old, DTensor):
                if old not in whole:
<<placed>>                    whole[old] = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                module.register_parameter(leaf, whole[old])
<<after>>'''

GATHERED = """    for _, module in named(model, GATHERED):  # once for all products that read it
        gather = PrepareModuleOutput(
            output_layouts=Shard(<<sequence_dim>>), desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(module, mesh, gather)
"""

WHOLE = """                    new = DTensor.from_local(old.data, mesh, [Replicate()], run_check=False)
"""
PLACED = """                    layouts = [layout for path, layout in PLACED.items() if called(f"{name}.{leaf}", path)]
                    new = distribute_tensor(old.data, mesh, layouts[:1] or [Replicate()], src_data_rank=None)
"""

RETIE = """    for first, *others in tied:
        for other in others:
            parent, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(parent), leaf, model.get_parameter(first))
"""

CONTEXT = '''
@contextmanager
def cut_operators(mesh):
    """Operators see plain tensors as whole on the tensor axis; of the CPU's attention DTensor knows the plain one."""
    fused = mesh.device_type != "cpu"
    with implicit_replication(), nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        yield
'''

WHOLE_GRADIENTS = """    for parameter in <<module>>.parameters():
        parameter.register_post_accumulate_grad_hook(summed)
"""

SUMMED = '''
def summed(parameter):
    """A gradient lies as its parameter does: parts that ranks hold of the sum are added up."""
    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
'''

STAGE = '''
class Sent(Exception):
    """Ends a stage's forward pass where the next stage begins."""


class Skipped(torch.nn.Module):
    """In the place of a block of another stage."""

    def forward(self, hidden, *args, **kwargs):
        return hidden


class Unread(torch.nn.Module):
    """In the place of an embedding whose rows an earlier stage reads: what becomes of them here is thrown away."""

    def __init__(self, embedding):
        super().__init__()
        self.features, self.dtype = embedding.embedding_dim, embedding.weight.dtype

    def forward(self, rows):
        return torch.zeros((*rows.shape, self.features), dtype=self.dtype, device=rows.device)


class Stage(torch.nn.Module):
    """The model of which only the blocks from one cut to the next run: what comes before them is taken from the stage
    before, and ends where the next stage begins."""

    def __init__(self, model, number):
        super().__init__()
        for name, stages in OTHERS.items():
            if number not in stages:
                module = model.get_submodule(name)
                if number < min(stages):
                    model.set_submodule(name, Skipped())
                elif isinstance(module, torch.nn.Embedding):
                    model.set_submodule(name, Unread(module))
        for position, (name, _) in enumerate(named(model, BLOCKS)):
            if position not in STAGES[number]:
                model.set_submodule(name, Skipped())
        if number > 0:
            model.get_submodule(CUTS[number - 1]).register_forward_pre_hook(self.take, with_kwargs=True)
        if number < len(CUTS):
            model.get_submodule(CUTS[number]).register_forward_pre_hook(self.send, with_kwargs=True)
        self.model, self.received, self.rows = model, None, []

    def take(self, module, args, kwargs):
        if args:
            return (self.received, *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: self.received}

    def send(self, module, args, kwargs):
        raise Sent(args[0] if args else next(iter(kwargs.values())))

    def forward(self, *received, number):
        """Of one micro-batch: what the next stage takes, or the loss."""
        args, kwargs = self.rows[int(number)]
        self.received = <<received>> if received else None
        try:
            return torch.stack([<<loss>>])
        except Sent as sent:
            return <<sent>>
'''

TIED_STAGES = '''
def add_tied(stage, mesh):
    """A parameter that two stages hold has the sum of both gradients on both."""
    number, ranks = mesh["pipeline"].get_local_rank(), mesh["pipeline"].mesh.flatten().tolist()
    for (first, name), (second, other) in TIED:
        if number in (first, second):
            mine = stage.model.get_parameter(name if number == first else other).grad
            mine = mine.to_local() if isinstance(mine, DTensor) else mine
            theirs, peer = torch.empty_like(mine), ranks[second if number == first else first]
            sent = [dist.P2POp(dist.isend, mine.clone(), peer), dist.P2POp(dist.irecv, theirs, peer)]
            for work in dist.batch_isend_irecv(sent):
                work.wait()
            mine += theirs
'''

ROWS = '''
def rows(mesh, args, kwargs):
    """The inputs of this rank's micro-batches: of every tensor with the rows of the batch its own piece."""
    shares = PARALLELISM.get("replicate", 1) * PARALLELISM.get("shard", 1) * MICROBATCHES
    place = mesh["replicate"].get_local_rank() * mesh["shard"].size() + mesh["shard"].get_local_rank()

    def piece(value, number):
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != BATCH:
            return value
        return value.chunk(shares)[place * MICROBATCHES + number]

    return [
        (tuple(piece(a, number) for a in args), {name: piece(a, number) for name, a in kwargs.items()})
        for number in range(MICROBATCHES)
    ]


def loss_of(output):
    """The loss in what a model returns: itself, its .loss, or the first of several."""
    loss = getattr(output, "loss", output[0] if isinstance(output, tuple | list) else output)
    return <<whole>>


def mean_over_ranks(loss, mesh):
    """The loss of all rows, on every rank."""
    loss = loss.detach().double() / (mesh["replicate"].size() * mesh["shard"].size())
    for name in ("pipeline", "replicate", "shard"):
        if mesh[name].size() > 1:
            dist.all_reduce(loss, group=mesh.get_group(name))
    return loss
'''

STEP = '''
def step(model, mesh, *args, **kwargs):
    """Forward and backward passes of a batch, all of whose rows are given: gradients lie in .grad; its loss."""
    total = 0.0
    for <<each>> in <<batches>>:
<<loop>>    return mean_over_ranks(total, mesh)
'''

STEP_OF_STAGE = '''
def step(stage, mesh, *args, **kwargs):
    """Forward and backward passes of a batch, all of whose rows are given: gradients lie in .grad; its loss."""
    stage.rows, losses = rows(mesh, args, kwargs), []
    numbers = torch.arange(MICROBATCHES)
<<run>>    loss = torch.stack(losses).mean() if losses else torch.zeros((), device=mesh.device_type)
    return mean_over_ranks(loss, mesh)
'''

MAIN = '''
def main():
    """Train a model: parallelize.py FILE.py:FUNCTION [STEPS]."""
    path, _, name = sys.argv[1].partition(":")
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = device_mesh()
    torch.manual_seed(0)  # every rank builds the same
    model, args, *more = runpy.run_path(path)[name]()
    args = tuple(a.to(mesh.device_type) if isinstance(a, torch.Tensor) else a for a in args)
    kwargs = {k: a.to(mesh.device_type) if isinstance(a, torch.Tensor) else a for k, a in (more or [{}])[0].items()}
    model = parallelize(model.to(mesh.device_type), mesh)
    optimizer = torch.optim.<<optimizer>>(model.parameters(), lr=1e-3)
    for number in range(int(sys.argv[2]) if len(sys.argv) > 2 else 10):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = float(step(model, mesh, *args, **kwargs))
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss:.6f}, {time.perf_counter() - start:.3f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
