"""Published configurations are read as what they say; what has no meaning for a plan is listed, nothing is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.exchange import Configuration, ConfigurationError, read_configuration
from shardwright.exchange.reading import engine_of

FILES = Path(__file__).parents[1] / "data" / "exchange"

PUBLISHED = {
    "torchtitan/llama3_8b.toml": "shard open (parameters), micro-batches of 1, light recomputation",
    "torchtitan/llama3_70b.toml": "shard open (parameters) × tensor 8 with sequence, micro-batches of 8, "
    "whole recomputation",
    "torchtitan/llama3_405b.toml": "shard open (parameters) × tensor 8 with sequence, micro-batches of 2, "
    "whole recomputation",
    "torchtitan/llama3_70b_4d.toml": "shard open (parameters) × context 2 × tensor 8 with sequence × pipeline 2 (1f1b), "
    "2 micro-batches of 8, whole recomputation",
    "torchtitan/deepseek_v3_16b.toml": "shard open (parameters), micro-batches of 8, whole recomputation",
    "torchtitan/deepseek_v3_671b.toml": "shard open (parameters), micro-batches of 4, light recomputation",
    "torchtitan/debug_model.toml": "shard open (parameters), micro-batches of 8, whole recomputation of 50%",
    "torchtitan/llama4_17bx16e.toml": "shard open (parameters) × tensor 8 with sequence, micro-batches of 8, "
    "whole recomputation",
    "megatron/gpt3_175b.sh": "replicate open × tensor 8 × pipeline 16 (1f1b), micro-batches of 1, 1536 rows a step",
    "megatron/llama3_8b_fp8.sh": "shard open (optimizer), micro-batches of 1, 128 rows a step",
    "megatron/bert_340m.sh": "replicate open × tensor 8 × pipeline 16 (1f1b), micro-batches of 4, 32 rows a step",
    "megatron/t5_220m.sh": "replicate open, micro-batches of 64, 512 rows a step",
    "megatron/mixtral_small.sh": "shard open (optimizer), expert 2, micro-batches of 1, 4 rows a step",
    "deepspeed/zero1.json": "shard open (optimizer)",
    "deepspeed/zero2_megatron.json": "shard open (gradients), 16 rows a step",
    "deepspeed/zero3_megatron.json": "shard open (parameters), micro-batches of 8",
    "deepspeed/zero3_offload.json": "shard open (parameters)",
    "deepspeed/bert_lamb_64k.json": "replicate open, micro-batches of 64, 65536 rows a step",
    "accelerate/nd.yaml": "shard 2 (parameters) × context 4",
    "accelerate/tp_hsdp.yaml": "replicate 2 × shard 2 (parameters) × tensor 2",
    "accelerate/cp.yaml": "context 8, whole recomputation",
    "accelerate/fsdp.yaml": "shard 2 (parameters)",
    "accelerate/deepspeed.yaml": "shard open (optimizer)",
    "accelerate/megatron.yaml": "replicate open",
}
"""The decisions of each, without precision and optimizer."""


def of(name: str) -> Configuration:
    return read_configuration(FILES / name)


def test_every_published_file_is_in_the_table():
    there = {str(path.relative_to(FILES)) for path in FILES.glob("*/*.*")}
    assert there == set(PUBLISHED)
    for engine, least in {"torchtitan": 6, "megatron": 4, "deepspeed": 4, "accelerate": 4}.items():
        assert sum(name.startswith(engine) for name in there) >= least


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_says(name):
    found = of(name)
    assert found.summary().startswith(PUBLISHED[name] + ", ")
    assert found.engine == name.partition("/")[0]
    assert found.unknown == ()


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_key_of_a_published_file_is_passed_over(name):
    """Every key there is either decides something or stands in one of the lists: taking it away changes the record."""
    import json

    from shardwright.exchange import accelerate, deepspeed, torchtitan
    from shardwright.exchange.configuration import flattened

    text = (FILES / name).read_text()
    engine = name.partition("/")[0]
    if engine == "torchtitan":
        keys, found = flattened(torchtitan.load(text, name)), torchtitan.parse(text, name)
    elif engine == "deepspeed":
        keys, found = flattened(json.loads(text)), deepspeed.parse(json.loads(text), name)
    elif engine == "accelerate":
        table = accelerate.load(text, str(FILES / name))
        keys, found = flattened(table), accelerate.parse(table, str(FILES / name))
    else:
        from shardwright.exchange import megatron
        from shardwright.exchange.shell import command_words

        keys, found = megatron.options(command_words(text, name)), megatron.parse(text, name)
    listed = {remark.key for remark in (*found.unsupported, *found.elsewhere, *found.unknown)}
    for key in keys.keys() - listed:
        assert any(word in key for word in DECIDING), f"{key} of {name} is neither listed nor decides anything"


DECIDING = """
    degree optimizer.name optimizer.type batch seq-length seq_len encoder-seq-length activation_checkpoint.mode
    selective_ac_option mixed_precision schedule reshard_after_forward parallel size stage enabled gradient_accumulation
    num-layers distributed-optimizer bf16 fp16 nproc nnodes distributed_type num_processes num_machines fsdp_version
    fsdp_sharding activation_checkpointing deepspeed_config_file recompute downcast
""".split()  # noqa: SIM905


def test_a_key_that_nobody_knows_is_listed(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        "[parallelism]\ntensor_parallel_degree = 2\nteleportation_degree = 4\n[training]\nlocal_batch_size = 2\n"
    )
    found = read_configuration(path)
    assert [(r.key, r.value) for r in found.unknown] == [("parallelism.teleportation_degree", "4")]
    (tmp_path / "run.sh").write_text("torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --teleport yes\n")
    assert [str(r) for r in read_configuration(tmp_path / "run.sh").unknown] == ["teleport = 'yes'"]
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "teleport": {"on": true}}')
    assert [r.key for r in read_configuration(tmp_path / "ds.json").unknown] == ["teleport.on"]
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nteleport: 3\n")
    assert [r.key for r in read_configuration(tmp_path / "a.yaml").unknown] == ["teleport"]


def test_offloading_and_8_bit_floats_are_named_as_unsupported():
    assert {r.key for r in of("deepspeed/zero3_offload.json").unsupported} == {
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    }
    assert {r.key for r in of("torchtitan/llama3_405b.toml").unsupported} == {
        "model.converters",
        "parallelism.enable_async_tensor_parallel",
    }
    assert "fp8-format" in {r.key for r in of("megatron/llama3_8b_fp8.sh").unsupported}
    assert "optimizer.type" in {r.key for r in of("deepspeed/bert_lamb_64k.json").unsupported}


@pytest.mark.parametrize(
    "name",
    ["LlamaConfig", "Qwen3Config", "MixtralConfig", "Gemma2Config", "Phi3Config", "MistralConfig", "DeepseekV3Config"],
)
def test_tp_plans_of_hugging_face(name):
    import transformers

    plan = getattr(transformers, name).base_model_tp_plan
    found = read_configuration("hf", f"hf:{name}")
    assert found.tensor is None and not found.unknown
    assert len(found.modules) + len(found.elsewhere) == len(plan)
    for pattern, way in found.modules:
        assert way == ("columns" if "colwise" in plan[pattern] else "rows" if "rowwise" in plan[pattern] else "whole")


def test_degrees_are_settled_for_a_cluster():
    found = of("torchtitan/llama3_70b.toml").on(64)
    assert (found.shard, found.tensor, found.batch, found.microbatches) == (8, 8, 64, 1)
    found = of("megatron/gpt3_175b.sh").on(1024)
    assert (found.replicate, found.microbatches, found.microbatch) == (8, 192, 1)
    assert of("megatron/gpt3_175b.sh").on(1024, batch=768).microbatches == 96
    assert of("deepspeed/zero2_megatron.json").on(4).microbatch == 4
    with pytest.raises(ConfigurationError, match=r"tensor 8.*that makes 128 devices, not 24"):
        of("megatron/bert_340m.sh").on(24)
    with pytest.raises(ConfigurationError, match="no 1 micro-batches"):
        of("torchtitan/llama3_8b.toml").on(8, batch=9)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[parallelism", "is not TOML"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 'many'\n", "is 'many'"),
        ("a.toml", "[parallelism]\npipeline_parallel_schedule = 'Snake'\n", "there is no schedule 'snake'"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 0\n", "has tensor = 0"),
        ("a.json", "[1]", "is no table"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "ZeRO has no stage 7"),
        ("a.yaml", "distributed_type: TELEPATHY\n", "'telepathy' is not read"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.sh", "echo hello\n", "has no options of Megatron"),
        ("a.sh", "torchrun x.py --a 'open\n", "is no script that can be read"),
        ("a.py", "x = 1\n", "has no table PARALLELISM"),
        ("a.py", "x = (", "is not Python"),
        ("a.ini", "", "no configuration that can be read"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_configuration(tmp_path / name)
    assert caught.value.remedy


def test_the_engine_is_told_by_the_file(tmp_path):
    (tmp_path / "a.json").write_text('{"distributed_type": "FSDP"}')
    (tmp_path / "b.json").write_text('{"model_type": "llama"}')
    assert [engine_of(str(tmp_path / name)) for name in ("a.json", "b.json", "run.SH")] == [
        "accelerate",
        "hf",
        "megatron",
    ]
    assert read_configuration(tmp_path / "b.json").modules
