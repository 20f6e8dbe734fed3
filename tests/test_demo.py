# SPDX-License-Identifier: Apache-2.0
"""The demo's parts that need no server: workloads, sums, comparison, report."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("rich")

from rich.console import Console

from hybrid_plugin import cli
from hybrid_plugin.tools.demo import large_states, picture
from hybrid_plugin.tools.demo import run as demo_run
from hybrid_plugin.tools.demo import server as demo_server
from hybrid_plugin.tools.demo.client import Answer, Client, _Reader
from hybrid_plugin.tools.demo.compare import Tally, compare_conversation
from hybrid_plugin.tools.demo.engines import Launch, Levels, VllmEngine, speculating
from hybrid_plugin.tools.demo.measure import (
    Peaks,
    Result,
    Run,
    Target,
    percentile,
    summarise,
)
from hybrid_plugin.tools.demo.patience import LEAST_LIMIT_S, PROBES, Patience
from hybrid_plugin.tools.demo.progress import PERIOD_S, Display
from hybrid_plugin.tools.demo.report import Outcome, to_json, to_table
from hybrid_plugin.tools.demo.server import DemoError, Server
from hybrid_plugin.tools.demo.sglang import SglangEngine
from hybrid_plugin.tools.demo.workloads import (
    Conversation,
    Question,
    Workload,
    all_workloads,
    burst,
    burst_of,
    shared_prompt,
)
from hybrid_plugin.tools.prometheus_text import Metrics

SHARED, CHATS, TREE, BURST = all_workloads()


@dataclass(frozen=True)
class Said:
    """An answer with as much as is compared."""

    tokens: Sequence[str]
    logprobs: Sequence[Mapping[str, float]] = field(default_factory=tuple)
    error: str | None = None


def certain(tokens: str) -> Said:
    """An answer whose tokens are one letter each and without alternative."""
    return Said(tuple(tokens), tuple({t: 0.0} for t in tokens))


# --------------------------------------------------------------------- workloads


def test_workloads_have_the_sizes_promised() -> None:
    assert SHARED.requests == 40
    assert (len(CHATS.conversations), CHATS.requests) == (10, 60)
    assert BURST.requests == BURST.concurrency == 64
    assert TREE.requests == 36


def test_workloads_are_the_same_every_time() -> None:
    assert all_workloads() == (SHARED, CHATS, TREE, BURST)


def test_system_prompt_is_shared_and_has_200_tokens() -> None:
    systems = {c.opening[0]["content"] for c in SHARED.conversations}
    assert len(systems) == 1
    assert len(systems.pop().encode()) == 200


def test_every_question_can_be_answered_from_what_was_said() -> None:
    for workload in all_workloads():
        for conversation in workload.conversations:
            said = "".join(m["content"] for m in conversation.opening)
            for question in conversation.questions:
                said += question.text
                thing = question.text.rsplit("for ", 1)[1].rstrip("?")
                assert f"The code for {thing} is {question.answer}." in said


def test_tree_branches_in_the_middle() -> None:
    texts = sorted(c.questions[0].text for c in TREE.conversations)
    trunks = {text.split("Part ")[0] for text in texts}
    limbs = {text.split("Section ")[0] for text in texts}
    twigs = {text.split("What is")[0] for text in texts}
    assert (len(trunks), len(limbs), len(twigs)) == (1, 3, 9)
    assert len(trunks.pop()) > 200


def test_burst_shares_nothing() -> None:
    starts = {c.questions[0].text[:60] for c in BURST.conversations}
    assert len(starts) == 64


@pytest.mark.parametrize(
    ("tokens_per_s", "requests"), [(0, 16), (400, 16), (1000, 27), (9000, 64)]
)
def test_burst_takes_as_long_on_any_machine(tokens_per_s: float, requests: int) -> None:
    found = burst_of(tokens_per_s)
    assert found == burst(requests)
    assert found.conversations == BURST.conversations[:requests]


def test_the_burst_is_sized_by_what_stock_computed_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """1,500 tokens a second in the tree, in which the plugin computed 600."""
    ran: list[tuple[str, str, int]] = []

    def played(target: Target, workload: Workload, tick: Callable[[], None]) -> Run:
        ran.append((target.server.name, workload.label, workload.requests))
        hits = 2400 if target.plugin else 1500
        result = Result(workload.requests, 0, 3000, hits, 1.0, 2.0, 1.0, 0, 1, 1, 1, 0)
        return Run(result, [[Answer()] for _ in workload.conversations])

    monkeypatch.setattr(demo_run.measure, "measure", played)
    monkeypatch.setattr(demo_run, "running", lambda targets, _: nullcontext(targets))
    monkeypatch.setattr(VllmEngine, "version", lambda self: "1.2")
    console = Console(file=io.StringIO(), width=200)
    out = tmp_path / "demo.json"
    demo = demo_run.Demo(VllmEngine(16 << 20), tmp_path, out, console=console)
    assert demo.run()
    both = ("stock", "plugin")
    sizes = {"warm-up": 8, "shared": 40, "chats": 60, "tree": 36, "burst": 40}
    assert [count for _, _, count in ran] == [
        count for count in sizes.values() for _ in both
    ]
    assert [name for name, *_ in ran] == [*both] * len(sizes)


# -------------------------------------------------------------------------- sums


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([7.0], 0.95, 7.0),
        ([3, 1, 2], 0.5, 2),
        (range(1, 21), 0.95, 19),
    ],
)
def test_percentile(
    values: Sequence[float], share: float, expected: float | None
) -> None:
    assert percentile(list(values), share) == expected


def test_sums_leave_out_what_failed() -> None:
    questions = (Question("a?", "12"), Question("b?", "34"))
    workload = Workload("n", "l", "t", (Conversation((), questions),), 1)
    answers = [
        [
            Answer(text="12", prompt_tokens=10, cached_tokens=4, ttft_s=0.02),
            Answer(error="500: no"),
        ]
    ]
    peaks = Peaks()
    peaks.note(Levels(pages=3, running=1, preemptions=5))
    peaks.note(Levels(pages=2, running=2, preemptions=7))
    result = summarise(workload, answers, peaks, 1.234)
    assert result == Result(
        requests=2,
        failed=1,
        prompt_tokens=10,
        cached_tokens=4,
        ttft_ms_p50=20.0,
        ttft_ms_p95=20.0,
        seconds=1.23,
        right_answers=1,
        peak_pages=3,
        peak_slots=None,
        peak_running=2,
        preemptions=2,
    )
    assert result.cached_share == 0.4


def test_metrics_are_read_by_name_and_label() -> None:
    metrics = Metrics(
        "# HELP hybrid_cache_pages KV pages\n"
        'hybrid_cache_pages{engine="0",kind="used",model_name="a \\"b\\""} 12.0\n'
        'hybrid_cache_pages{engine="0",kind="free",model_name="m"} 3.0\n'
        'hybrid_cache_slots{engine="0",kind="used"} 2.0\n'
        "vllm:num_requests_running 4.0\n"
    )
    levels = VllmEngine(0).levels(metrics, plugin=True)
    assert levels == Levels(pages=12, slots=2, running=4)
    assert metrics.total("hybrid_cache_pages") == 15


def test_blocks_of_stock_are_counted_from_its_share() -> None:
    metrics = Metrics(
        'vllm:cache_config_info{block_size="256",num_gpu_blocks="65"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    )
    levels = VllmEngine(0).levels(metrics, plugin=False)
    assert levels == Levels(pages=16)


# -------------------------------------------------------------------- comparison


def test_equal_answers() -> None:
    answers = [certain("abc"), certain("d")]
    assert compare_conversation(answers, answers) == Tally(equal=2)


@pytest.mark.parametrize(
    ("other", "near_ties", "wrong"), [("b", 1, 0), ("c", 0, 1), ("z", 0, 1)]
)
def test_a_difference_counts_by_how_undecided_the_reference_was(
    other: str, near_ties: int, wrong: int
) -> None:
    reference = Said("a", [{"a": -0.5, "b": -1.0, "c": -3.0}])
    tally = compare_conversation(
        [reference, certain("x")], [certain(other), certain("y")]
    )
    assert (tally.near_ties, tally.wrong) == (near_ties, wrong)
    assert tally.not_compared == 1, "later turns asked something else"
    assert tally.acceptable == (not wrong)


@pytest.mark.parametrize(
    ("reason", "text"), [("stop", "81"), ("length", "81<end>"), (None, "81<end>")]
)
def test_the_token_that_ends_an_answer_is_no_text_of_it(
    reason: str | None, text: str
) -> None:
    reader = _Reader()
    for piece in ("8", "1", "<end>"):
        top = {"token": piece, "logprob": -0.1}
        logprobs = {"content": [{"token": piece, "top_logprobs": [top]}]}
        reader.take({"choices": [{"delta": {"content": piece}, "logprobs": logprobs}]})
    reader.take({"choices": [{"delta": {}, "finish_reason": reason}]})
    reader.take({"usage": {"prompt_tokens": 4, "completion_tokens": 3}})
    answer = reader.answer()
    assert (answer.text, answer.tokens) == (text, ("8", "1", "<end>"))


def test_a_shorter_answer_is_wrong() -> None:
    tally = compare_conversation([certain("ab")], [certain("a")])
    assert tally.wrong == 1


def test_a_failure_is_wrong() -> None:
    tally = compare_conversation([certain("a")], [Said("", error="500")])
    assert tally == Tally(wrong=1)


def test_tallies_add_up() -> None:
    total = Tally(1, 2, 3, 4, 0.5) + Tally(10, 20, 30, 40, 0.25)
    assert total == Tally(11, 22, 33, 44, 0.5)


# ------------------------------------------------------------------------ report


STOCK = Result(40, 0, 90_000, 45_000, 9.5, 20_000.0, 1.5, 40, 7, None, 4, 0)


def outcome(tally: Tally) -> Outcome:
    """An outcome with made-up numbers."""
    stock = STOCK
    plugin = Result(40, 1, 90_000, 72_000, None, None, 1.5, 39, 9, 3, 4, 0)
    return Outcome(shared_prompt(), stock, plugin, tally)


def test_json_has_the_agreed_form() -> None:
    data = to_json("vllm", "1.2", [outcome(Tally(equal=39, near_ties=1))], {})
    assert json.loads(json.dumps(data)) == data
    assert {"engine", "engine_version", "machine", "workloads"} <= data.keys()
    (workload,) = data["workloads"]
    assert workload["name"] == "shared_system_prompt"
    assert workload["outputs_equal"] is True
    agreed = {
        "prompt_tokens",
        "cached_tokens",
        "ttft_ms_p50",
        "ttft_ms_p95",
        "failed",
        "peak_pages",
        "peak_slots",
    }
    assert agreed <= workload["stock"].keys()
    assert workload["stock"].keys() == workload["plugin"].keys()


def test_wrong_answers_are_not_equal() -> None:
    (workload,) = to_json("e", "v", [outcome(Tally(wrong=1))], {})["workloads"]
    assert workload["outputs_equal"] is False


def test_table_fits_a_narrow_terminal() -> None:
    console = Console(width=80)
    outcomes = [outcome(Tally(equal=38, near_ties=2))] * 4
    with console.capture() as capture:
        console.print(to_table("title", outcomes, "a page is a page"))
    text = capture.get()
    assert "…" not in text
    assert "50.0%" in text and "80.0%" in text
    assert "~2" in text


def test_a_sentence_sums_up_all_workloads() -> None:
    little = replace(STOCK, cached_tokens=16, ttft_ms_p50=None)
    alone = replace(outcome(Tally()), workload=BURST, stock=little, plugin=little)
    told = picture.sentence("vllm", [*[outcome(Tally(equal=40))] * 2, alone])
    assert told == (
        "Of prompts that have a beginning in common the plugin restored 80%, vllm "
        "alone 50%."
    )
    slow = replace(outcome(Tally()), plugin=replace(STOCK, ttft_ms_p50=38.0))
    fast = replace(outcome(Tally()), plugin=replace(STOCK, ttft_ms_p50=2.375))
    told = picture.sentence("vllm", [slow, fast])
    assert told == (
        "Of prompts that have a beginning in common the plugin restored 50%, vllm "
        "alone 50%; the median time to the first token was 1.00 times that of vllm "
        "alone."
    )


def test_bars_are_as_long_as_shares_in_the_terminal_and_in_the_picture(
    tmp_path: Path,
) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(picture.bars([outcome(Tally())]))
    lines = [line for line in capture.get().splitlines() if "%" in line]
    assert [line.count("█") for line in lines] == [15, 24]
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "demo.png"
    picture.save_png([outcome(Tally()), outcome(Tally())], "title", path)
    pixels = image.open(path).convert("RGB")
    grey, blue = ((0x9A, 0xA5, 0xB1), (0x1F, 0x77, 0xB4))
    counts = [
        [pixels.getpixel((x, y)) for x in range(pixels.width)]
        for y in range(pixels.height)
    ]
    longest = [max(row.count(colour) for row in counts) for colour in (grey, blue)]
    assert longest[1] / longest[0] == pytest.approx(0.8 / 0.5, rel=0.01)


# ------------------------------------------------------------------ large states


def test_more_value_heads_have_zeros_for_weights_and_change_nothing() -> None:
    torch = pytest.importorskip("torch")
    heads = large_states.Heads(key=2, value=4, key_dim=3, value_dim=5)

    def wide(part: str, *shape: int) -> tuple[Any, Any]:
        old = torch.rand(shape) + 1
        return old, large_states.widened(f"layers.0.linear_attn.{part}", old, heads)

    old, new = wide("in_proj_qkvz.weight", 2 * 26, 7)
    old, new = old.view(2, 26, 7), new.view(2, 86, 7)
    assert torch.equal(new[:, :16], old[:, :16]) and not new[:, 16:46].any()
    assert torch.equal(new[:, 46:56], old[:, 16:]) and not new[:, 56:].any()
    old, new = wide("in_proj_ba.weight", 2 * 4, 7)
    old, new = old.view(2, 2, 2, 7), new.view(2, 2, 8, 7)
    assert torch.equal(new[:, :, :2], old) and not new[:, :, 2:].any()
    old, new = wide("A_log", 4)
    assert new.tolist() == [*old[:2], *[0] * 6, *old[2:], *[0] * 6]
    old, new = wide("conv1d.weight", 12 + 20, 1, 4)
    assert torch.equal(new[:22], old[:22]) and not new[22:52].any()
    assert torch.equal(new[52:62], old[22:]) and not new[62:].any()
    old, new = wide("out_proj.weight", 7, 20)
    assert torch.equal(new[:, :10], old[:, :10]) and not new[:, 10:40].any()
    assert torch.equal(new[:, 40:50], old[:, 10:]) and not new[:, 50:].any()
    old, new = wide("norm.weight", 5)
    assert new is old


def test_a_wider_model_is_written_once_and_only_of_its_kind(tmp_path: Path) -> None:
    load = pytest.importorskip("safetensors.torch").load_file
    model = demo_run.bundled_model()
    folder = large_states.write(model, tmp_path / "wide")
    config = json.loads((folder / "config.json").read_text())
    assert config["linear_num_value_heads"] == 4 * large_states.TIMES
    tensors = load(folder / "model.safetensors")
    assert tensors["model.layers.0.linear_attn.A_log"].shape == (16,)
    assert (folder / "tokenizer.json").is_file()
    (folder / "model.safetensors").unlink()
    assert large_states.write(model, folder) == folder
    assert not (folder / "model.safetensors").exists()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="is a llama"):
        large_states.write(folder, tmp_path / "other")


# ---------------------------------------------------------------- when it fails


def test_a_server_that_dies_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    script = "print('first'); raise SystemExit('no memory')"
    log = tmp_path / "server.log"
    server = Server("stock", Launch([sys.executable, "-c", script]), 1, log)
    server.start()
    try:
        with pytest.raises(DemoError) as caught:
            server.wait_until_ready()
    finally:
        server.stop()
    message = str(caught.value)
    assert "stock server ended with status 1" in message
    assert str(log) in message and "no memory" in message


def test_both_servers_get_equal_flags_but_for_stock_s_own() -> None:
    engine = VllmEngine(cache_bytes=1, stock_flags=("--best",))
    stock = engine.launch(Path("m"), 1, plugin=False)
    plugin = engine.launch(Path("m"), 1, plugin=True)
    assert [*plugin.command, "--best"] == list(stock.command)
    different = stock.environment.items() ^ plugin.environment.items()
    assert {name for name, _ in different} == {"HYBRID_PLUGIN"}


def test_sglang_servers_differ_in_the_cache_only() -> None:
    engine = SglangEngine(stock_flags=("--best",))
    stock = list(engine.launch(Path("m"), 1, plugin=False).command)
    plugin = list(engine.launch(Path("m"), 1, plugin=True).command)
    assert stock.pop() == "--best"
    assert plugin.pop() == "--enable-hybrid-plugin"
    assert stock == plugin


@pytest.mark.parametrize("gpu", [False, True])
def test_speculation_is_equal_on_both_servers(gpu: bool) -> None:
    engine = speculating(VllmEngine(cache_bytes=1), 3, gpu=gpu)
    stock = list(engine.launch(Path("m"), 1, plugin=False).command)
    plugin = list(engine.launch(Path("m"), 1, plugin=True).command)
    flag = '--speculative-config={"method": "mtp", "num_speculative_tokens": 3}'
    assert flag in stock and flag in plugin
    assert ("--no-enable-prefix-caching" in stock) == (not gpu)
    assert ("speculates on a CPU" in engine.page_note) == (not gpu)
    assert engine.settings()["drafts"] == 3


def test_levels_of_vllm_count_drafts() -> None:
    text = """
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 7.0
"""
    levels = VllmEngine(cache_bytes=1).levels(Metrics(text), plugin=True)
    assert (levels.verifications, levels.accepted) == (10, 7)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        ((10, 7), (30, 37), 2.5),
        ((None, None), (4, 0), 1.0),
        ((10, 7), (10, 7), None),
        ((None, None), (None, None), None),
    ],
)
def test_acceptance_length_is_of_the_workload_alone(
    first: tuple[int | None, int | None],
    last: tuple[int | None, int | None],
    expected: float | None,
) -> None:
    peaks = Peaks()
    for verifications, accepted in (first, last):
        peaks.note(Levels(verifications=verifications, accepted=accepted))
    assert peaks.acceptance_length == expected


def test_table_shows_drafts_where_there_are_any() -> None:
    def text(of: Outcome) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(to_table("t", [of], "a page is a page"))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    plain = outcome(Tally(equal=40))
    drafting = replace(plain, plugin=replace(plain.plugin, acceptance_length=2.25))
    assert "tokens a step" not in text(plain)
    assert "2.25" in text(drafting)


def test_speculation_is_for_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--engine", "sglang", "--speculate"]) == 2
    assert capsys.readouterr().err == "--speculate needs vLLM: leave --engine out.\n"


def test_levels_of_sglang() -> None:
    text = """
hybrid_cache_pages{engine="0",kind="used"} 3.0
hybrid_cache_slots{engine="0",kind="used"} 2.0
sglang:kv_used_tokens{model_name="m"} 48.0
sglang:mamba_used_tokens{model_name="m"} 6.0
sglang:num_running_reqs{model_name="m"} 2.0
"""
    metrics, engine = Metrics(text), SglangEngine()
    assert engine.levels(metrics, plugin=True) == Levels(3, 2, 2, 0)
    assert engine.levels(metrics, plugin=False) == Levels(3, 6, 2, 0)
    assert engine.levels(Metrics(""), plugin=True) == Levels()


def test_cli_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(self: VllmEngine) -> str:
        raise RuntimeError("vLLM is not installed.")

    monkeypatch.setattr(VllmEngine, "version", not_installed)
    assert cli.main(["demo", "--out", str(tmp_path / "demo.json")]) == 1
    assert capsys.readouterr().err == "vLLM is not installed.\n"


def test_importing_the_cli_is_light() -> None:
    heavy = "{'torch', 'vllm', 'httpx', 'rich', 'numpy'} & set(sys.modules)"
    script = f"import sys, hybrid_plugin.cli; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# ------------------------------------------------------------- on a slow machine


@dataclass
class Clock:
    """Stands still until it is told to move."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class SlowClient(Client):
    """Gets the events of a stream, with as much time before each as is said."""

    def __init__(self, clock: Clock, waits: Mapping[str, Sequence[float]]) -> None:
        super().__init__("http://nowhere", "m", {}, patience=Patience(clock))
        self.clock, self.waits = clock, waits

    async def _stream(self, body: Mapping[str, Any]) -> Answer:
        for seconds in self.waits[body["messages"][0]["content"]]:
            await asyncio.sleep(0)
            self.clock.now += seconds
            await asyncio.sleep(0)
            self.patience.progress()
        return Answer(text="answer")


def ask(client: Client, *names: str) -> list[Answer]:
    async def together() -> list[Answer]:
        asked = (client.ask([{"content": name}], 1) for name in names)
        return await asyncio.gather(*asked)

    return asyncio.run(together())


def test_a_request_that_makes_progress_may_take_any_time() -> None:
    client = SlowClient(Clock(), {"slow": [LEAST_LIMIT_S - 1] * 100})
    assert ask(client, "slow") == [Answer(text="answer")]
    assert client.clock.now > 90 * LEAST_LIMIT_S


class StuckClient(SlowClient):
    """Never answers what is called stuck; time flies while nothing happens."""

    async def _stream(self, body: Mapping[str, Any]) -> Answer:
        if body["messages"][0]["content"] != "stuck":
            return await super()._stream(body)
        while True:
            await asyncio.sleep(0.001)
            self.clock.now += 1000


def test_a_queued_request_waits_while_others_make_progress() -> None:
    class Queue(SlowClient):
        async def _stream(self, body: Mapping[str, Any]) -> Answer:
            if body["messages"][0]["content"] == "queued":
                await served.wait()
            answer = await super()._stream(body)
            served.set()
            return answer

    served = asyncio.Event()
    waits = {"first": [LEAST_LIMIT_S - 1] * 9, "queued": [1.0]}
    assert ask(Queue(Clock(), waits), "first", "queued") == [Answer(text="answer")] * 2


def test_a_request_without_any_progress_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Patience):
        left_s = property(lambda self: min(Patience.left_s.fget(self), 0.01))

    client = StuckClient(Clock(), {})
    client.patience = Impatient(client.clock)
    (answer,) = ask(client, "stuck")
    assert answer.error == f"no progress for {LEAST_LIMIT_S:.0f} seconds"


def test_the_limit_follows_the_longest_silence() -> None:
    clock = Clock()
    patience = Patience(clock)
    clock.now = 1e6  # nothing was asked
    with patience.request():
        assert patience.left_s == patience.limit_s == LEAST_LIMIT_S
        clock.now += 10
        patience.progress()
        assert patience.left_s == patience.limit_s == 10 * PROBES
        clock.now += 10 * PROBES + 1
        assert patience.left_s == 0


def test_a_server_may_start_slowly_while_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = Clock(), []
    monkeypatch.setattr(demo_server.time, "sleep", lambda seconds: None)
    log = tmp_path / "server.log"
    server = Server("stock", Launch(["sleep", "600"]), 1, log)
    server.start()

    def tell(state: str) -> None:
        told.append(state)
        clock.now += demo_server.START_SILENCE_S / 2
        if len(told) < 20:
            log.write_text("\n".join(f"step {n}" for n in range(len(told))) + "\n")

    try:
        with pytest.raises(DemoError, match="printed nothing for 600 seconds"):
            server.wait_until_ready(tell, clock)
    finally:
        server.stop()
    assert told[:3] == ["stock: ", "stock: step 0", "stock: step 1"]
    assert 20 < len(told) < 25


def lines_of(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_log_shows_progress_from_the_first_moment() -> None:
    clock, console = Clock(), Console(file=io.StringIO(), width=40)
    display = Display(console, clock)
    with display.waiting("Starting") as tell:
        assert lines_of(console) == ["Starting ..."]
        tell("too early")
        clock.now += PERIOD_S
        tell("loads [weights]")
    with display.counting("burst", 3) as tick:
        for _ in range(3):
            clock.now += 0.6 * PERIOD_S
            tick()
    assert lines_of(console) == [
        "Starting ...",
        "Starting: loads [weights], 10 s",
        "Starting: done, 10 s",
        "burst ...",
        "burst: 2 of 3, 12 s",
        "burst: done, 18 s",
    ]


def test_a_terminal_gets_bars() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Display(console).waiting("Starting") as tell:
        tell("stock: [bold]loads")
    with Display(console).counting("burst", 2) as tick:
        tick()
        tick()
    text = "\n".join(lines_of(console))
    assert "burst" in text and "2/2" in text


def test_the_bundled_model_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (demo_run.bundled_model() / "config.json").is_file()
