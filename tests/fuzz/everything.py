"""All targets, and which share of the cases each gets."""

from __future__ import annotations

from hypothesis import strategies as st

from fuzz import commands, targets
from fuzz.mutations import CHANGES, TORN
from fuzz.targets import Target

TARGETS = (
    Target(
        "plans",
        0.22,
        st.tuples(st.booleans(), st.booleans(), CHANGES, TORN, st.sampled_from(targets.PLAN_COMMANDS)),
        targets._run_plan,
        lambda: [targets._plan(staged) for staged in (False, True)],
    ),
    Target(
        "recorded steps",
        0.03,
        st.tuples(st.booleans(), CHANGES, TORN),
        targets._run_trace,
        lambda: [targets._trace(staged) for staged in (False, True)],
    ),
    Target(
        "clusters",
        0.1,
        st.tuples(CHANGES, TORN, st.sampled_from(targets.CLUSTER_OPTIONS)),
        targets._run_cluster,
        targets._cluster,
    ),
    Target(
        "choose problems",
        0.1,
        st.tuples(CHANGES, TORN, st.sampled_from(targets.METHODS)),
        targets._run_choose,
        targets._compile_choosing,
    ),
    Target(
        "place problems",
        0.1,
        st.tuples(
            st.sampled_from([targets.WORKLOAD, targets.KINDS]), CHANGES, TORN, st.sampled_from(targets.PLACE_OPTIONS)
        ),
        targets._run_place,
        targets._compile_placing,
    ),
    Target(
        "checkpoints",
        0.07,
        st.tuples(
            st.sampled_from(["torn", "torn", "calls", "entry", "place"]),
            TORN,
            TORN,
            st.floats(0, 1, exclude_max=True),
            st.sampled_from([None, 3, -1, 10**30, "x", "../x", "/etc/passwd", [], {}]),
        ),
        targets._run_checkpoint,
        targets._checkpoint,
    ),
    Target("caches", 0.03, st.tuples(CHANGES, TORN), targets._run_cache, targets._kept),
    Target(
        "command lines",
        0.06,
        st.tuples(st.sampled_from(targets.VERBS), st.lists(targets.TOKENS, max_size=3)),
        targets._run_words,
    ),
    Target("options", 0.14, commands.DRAW_OPTIONS, commands.run_options, commands.prepare_options),
    Target("models", 0.06, commands.DRAW_MODELS, commands.run_models, commands._files),
    Target("schedules", 0.05, commands.DRAW_SCHEDULES, commands.run_schedule, commands._orders),
    Target("profiles", 0.03, commands.DRAW_PROFILES, commands.run_profile, targets._compile_placing),
    Target("verdicts", 0.01, st.tuples(CHANGES, TORN), commands.run_verdict, commands._files),
)
