# SPDX-License-Identifier: Apache-2.0
"""`hybrid-plugin top` on what a cache publishes, and on pages that are none of its."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from email.message import Message
from http.client import BadStatusLine, InvalidURL
from urllib.error import HTTPError

import pytest
from prometheus_client import REGISTRY, generate_latest

from hybrid_plugin.cli import main
from hybrid_plugin.engine.metrics import CacheMetrics, snapshot_of
from hybrid_plugin.tools.top import sample, view
from hybrid_plugin.tools.top.command import NoMetricsError, show
from tests.core.elastic import ElasticSetup
from tests.core.support import make_cache, serve, span, start


@pytest.fixture
def published() -> Iterator[CacheMetrics]:
    """Metrics of an engine; those of other tests are taken off the page."""
    for collector, names in list(REGISTRY._collector_to_names.items()):
        if names[0].startswith("hybrid_cache_"):
            collector.clear()  # type: ignore[attr-defined]
    yield CacheMetrics({"engine": "top"})


def page(metrics: CacheMetrics, cache: object) -> str:
    metrics.publish(snapshot_of(cache))  # type: ignore[arg-type]
    return generate_latest().decode()


def test_totals_since_the_start(published: CacheMetrics) -> None:
    cache = make_cache(pages=9, slots=5)
    serve(cache, "a", span(0, 10))
    start(cache, "b", span(0, 15))
    found = sample.read(page(published, cache))
    assert found is not None
    text = view.lines(found, None, found)
    assert text[0] == f"{found.model}, since the start"
    assert "prompt tokens  25" in text
    assert "restored       40.0 %" in text
    assert "computed       new 60.0 %" in text
    assert any(line.startswith("kv ") and " 4 " in line for line in text)
    assert not any("moved" in line or "draft" in line for line in text)


def test_what_happened_between_two_samples(published: CacheMetrics) -> None:
    cache = make_cache(pages=33, slots=9)
    serve(cache, "a", span(0, 10))
    before = sample.read(page(published, cache))
    serve(cache, "b", span(0, 15))
    after = sample.read(page(published, cache))
    assert before is not None and after is not None
    text = view.lines(sample.between(before, after), 2.0, after)
    assert text[0].endswith("of the last 2.0 s")
    assert "prompt tokens  7.5/s" in text
    assert "restored       66.7 %  (since the start 40.0 %)" in text
    assert "snapshots      taken 0.5/s, evicted 0.0/s" in text


def test_a_server_that_was_started_again_counts_anew(published: CacheMetrics) -> None:
    cache = make_cache()
    serve(cache, "a", span(0, 10))
    early = sample.read(page(published, cache))
    serve(cache, "b", span(0, 15))
    late = sample.read(page(published, cache))
    assert early is not None and late is not None
    assert sample.between(late, early) == early


def test_elastic_pools_show_their_memory(published: CacheMetrics) -> None:
    cache = ElasticSetup(pages=12).build()
    serve(cache, "a", span(0, 10))
    found = sample.read(page(published, cache))
    assert found is not None
    text = view.lines(found, None, found)
    assert sum(line.endswith(" MiB") for line in text) == 2
    assert any(line.startswith("memory") and "moved in" in line for line in text)


def test_tiers_are_named_where_they_brought_anything() -> None:
    totals = dict.fromkeys(sample.COUNTERS, 0.0)
    totals |= {"queried_tokens": 100.0, "hit_tokens": 90.0}
    totals |= {"host_hit_tokens": 30.0, "host_loaded_bytes": 3 * 2.0**30}
    totals |= {"store_hit_tokens": 20.0, "peer_hit_tokens": 5.0}
    totals |= {"peer_loaded_bytes": 2.0**20}
    found = sample.Sample("m", totals, {"new": 10.0}, {})
    text = view.lines(found, None, found)
    shares = "device 35.0 %, host 30.0 %, peer 5.0 %, store 20.0 %"
    assert f"               {shares}" in text
    assert "peer           0.0 MiB stored, 1.0 MiB loaded" in text
    assert "host           0.0 MiB stored, 3.00 GiB loaded" in text


def test_it_goes_on_until_it_is_interrupted(
    published: CacheMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = make_cache()
    clock = itertools.count(0.0, 2.0)
    steps = iter([1, 2])

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if next(steps, None) is None:
            raise KeyboardInterrupt
        serve(cache, "a", span(0, 10))

    def fetch(url: str) -> str:
        assert url == "http://host:1/metrics"
        return page(published, cache)

    with pytest.raises(KeyboardInterrupt):
        show(
            "http://host:1/",
            0.5,
            once=False,
            fetch=fetch,
            sleep=sleep,
            now=lambda: next(clock),
        )
    screens = capsys.readouterr().out.split("\x1b[H\x1b[J")
    assert len(screens) == 3
    assert "prompt tokens  0" in screens[0]
    assert "prompt tokens  5.0/s" in screens[1]


def test_pages_without_the_plugin_are_named() -> None:
    with pytest.raises(NoMetricsError, match="no metrics of hybrid-plugin"):
        show("http://host", 1.0, once=True, fetch=lambda url: "up 1.0\n")


def test_a_server_without_a_page_of_metrics_is_told_how_to_get_one() -> None:
    """SGLang, as it starts by default."""

    def fetch(url: str) -> str:
        raise HTTPError(url, 404, "Not Found", Message(), None)

    with pytest.raises(NoMetricsError, match=r"without metrics .*--enable-metrics"):
        show("http://host", 1.0, once=True, fetch=fetch)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("http://127.0.0.1:9/metrics cannot be read: ")


@pytest.mark.parametrize(
    "error",
    [
        InvalidURL("no port"),
        BadStatusLine("SSH-2.0"),
        HTTPError("http://host", 500, "Internal Server Error", Message(), None),
    ],
)
def test_what_is_no_server_is_named(error: Exception) -> None:
    def fetch(url: str) -> str:
        raise error

    with pytest.raises(NoMetricsError, match="cannot be read: "):
        show("http://host", 1.0, once=True, fetch=fetch)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_it_waits_between_two_samples(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--every", seconds])
    assert f"{seconds} is no number above 0" in capsys.readouterr().err
