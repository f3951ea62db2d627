"""The benchmarks run, and say what was measured; how fast anything was is not judged here."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from examples.demo import stage

if sys.platform != "linux":
    pytest.skip("the benchmarks are for Linux", allow_module_level=True)

import dflockd
from benchmarks import callgrind, cpu, interpreters, published, record, report
from benchmarks.bench import LeftOutError
from benchmarks.callgrind import Callgrind, by_place
from benchmarks.child import Child
from benchmarks.loads import NAMES

BOUND = 90
# Those that are done soon, and need neither Redis nor anything of PyPI.
CHEAP = ["growth", "two_servers"]


def bench(*arguments, bound=BOUND):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=stage.ROOT,
        capture_output=True,
        text=True,
        timeout=bound,
        check=False,
    )


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "record.json"
    done = bench(*CHEAP, "--quick", "--rounds", "2", "--record", str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()) | {"printed": done.stdout}


def test_every_figure_of_every_round_is_in_the_record(document):
    topics = {topic["key"]: topic for topic in document["topics"]}

    assert {"memory-lock", "growth-held", "growth-waiters", "two-servers"} <= topics.keys()
    for topic in topics.values():
        assert topic["ours"] in topic["figures"]
        for values in topic["figures"].values():
            assert len(values) == document["rounds"] == 2
        for ratio in topic["ratios"].values():
            assert ratio["spread"] >= 0.0
            assert ratio["least"] <= ratio["median"] <= ratio["most"]


def test_the_terminal_shows_figures_and_goals(document):
    assert "Memory of a held lock, without its connection (B)" in document["printed"]
    assert "≥ 1.8 / 1.95 " in document["printed"]


def test_the_page_is_made_from_the_record(document):
    page = report.pages(document)[report.PAGE]

    [growth] = [topic for topic in document["topics"] if topic["key"] == "growth-held"]
    assert f"**{report.number(growth['ratios']['10 held']['median'])}**" in page
    assert report.NOT_MEASURED in page  # of the loads that did not run
    assert document["commit"] in page
    assert report.MARKED.sub("", page) == report.MARKED.sub("", report.PAGE.read_text())


@pytest.mark.skipif(not record.RESULTS.exists(), reason="nothing is recorded here")
def test_the_page_has_the_figures_of_the_latest_full_run():
    for path, text in report.pages(record.read()).items():
        assert text == path.read_text(), "run: python -m benchmarks.report"


def test_every_table_has_one_place():
    places = [
        name for page in report.PAGES for _, name, _ in report.MARKED.findall(page.read_text())
    ]

    assert sorted(places) == sorted(report.BLOCKS)


@pytest.mark.skipif(not record.RESULTS.exists(), reason="nothing is recorded here")
def test_the_plot_has_the_figures_of_the_latest_full_run(tmp_path, monkeypatch):
    plots = pytest.importorskip(
        "benchmarks.plots", reason="requirements-bench.txt is not installed"
    )
    published = plots.IMAGES
    monkeypatch.setattr(plots, "IMAGES", tmp_path)

    for path in plots.draw(record.read()):
        assert path.read_text() == (published / path.name).read_text()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_load_runs(tmp_path):
    pytest.importorskip("celery_once", reason="requirements-bench.txt is not installed")
    path = tmp_path / "record.json"
    done = bench("--quick", "--rounds", "1", "--record", str(path), bound=500)

    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    for page in report.pages(document).values():
        assert report.NOT_MEASURED not in page
    assert not document["left_out"].keys() & set(NAMES), document["left_out"]


def test_cpu_time_is_finer_than_a_clock_tick():
    seen = {cpu.spent(os.getpid())}
    end = time.process_time() + 0.02
    while time.process_time() < end:
        seen.add(cpu.spent(os.getpid()))

    assert len(seen) > 10
    assert max(seen) == pytest.approx(time.process_time(), abs=0.01)


LOOP = """
import sys
print(flush=True)
for line in sys.stdin:
    turns, loops = map(int, line.split())
    for _ in range(turns):
        for _ in range(loops): pass
    print(flush=True)
"""


@pytest.mark.skipif(not shutil.which("valgrind"), reason="valgrind is not installed")
def test_the_instructions_of_a_turn_are_counted_and_nothing_else(tmp_path):
    counter = Callgrind(tmp_path)
    # Without the site: under valgrind its imports take longer than the loops.
    with Child(*counter.prefix, sys.executable, "-S", "-c", LOOP) as program:

        def of_a_turn(loops, lengths):
            def run(turns):
                program.ask(f"{turns} {loops}")
                return turns

            return sum(counter.per_turn(program.pid, run, lengths).values())

        one = of_a_turn(2_000, (5, 15))
        assert of_a_turn(20_000, (1, 3)) == pytest.approx(10 * one, rel=0.05)
        assert of_a_turn(2_000, (5, 10)) == pytest.approx(one, rel=0.02)


PROFILE = """
ob=(1) /lib/libpython3.11.so.1.0
fn=(1) PyDict_New
10 5
+1 7
cob=(2) /site-packages/dflockd__mypyc.so
cfn=(2) CPyDef_table
calls=3 20
* 900
fn=(3) PyBlake2_blake2b_compress
-4 11
ob=(2)
fn=(2)
* 13
ob=(3) /lib/libc.so.6
fn=(4) memcpy
1 17
"""


def test_instructions_are_counted_where_they_are_and_once():
    assert by_place(filter(None, PROFILE.splitlines())) == {
        callgrind.PYTHON: 12,
        callgrind.DIGEST: 11,
        callgrind.COMPILED: 13,
        callgrind.REST: 17,
    }


def test_instructions_are_left_out_without_valgrind(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(LeftOutError, match="valgrind"):
        Callgrind(tmp_path)


def test_the_server_in_go_is_looked_for(tmp_path, monkeypatch):
    script, binary = tmp_path / "ours" / "dflockd", tmp_path / "go" / "dflockd"
    for path in (script, binary):
        path.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    shutil.copy(shutil.which("true"), binary)
    monkeypatch.setattr(published, "GO_PLACE", tmp_path / "none")
    monkeypatch.delenv(published.GO_VARIABLE, raising=False)

    monkeypatch.setenv("PATH", str(script.parent))
    with pytest.raises(LeftOutError, match=published.GO_VARIABLE):
        published.go()
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{binary.parent}")
    assert published.go() == binary
    monkeypatch.setenv(published.GO_VARIABLE, str(script))
    assert published.go() == script
    monkeypatch.setenv(published.GO_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(LeftOutError, match="cannot be run"):
        published.go()
    assert published.go_version() == "not installed"


def test_a_server_that_is_not_compiled_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(interpreters, "COMPILED", tmp_path / "python")
    with pytest.raises(LeftOutError, match="make compiled"):
        interpreters.compiled()

    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(LeftOutError, match="does not run"):
        interpreters.compiled()
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    if not dflockd.compiled:
        with pytest.raises(LeftOutError, match="not compiled"):
            interpreters.compiled()
        return
    assert interpreters.compiled() == str(tmp_path / "python")
    sources = shutil.copytree(interpreters.SOURCES, tmp_path / "dflockd")
    monkeypatch.setattr(interpreters, "SOURCES", sources)
    with (sources / "errors.py").open("a") as file:
        file.write("\n")
    with pytest.raises(LeftOutError, match="changed"):
        interpreters.compiled()


BUSY = """
import sys, time
print(flush=True)
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end: pass
"""


def test_a_process_is_idle_when_it_has_done_what_it_was_given():
    with Child(sys.executable, "-c", BUSY) as program:
        before = cpu.spent(program.pid)
        program.tell(0.4)
        cpu.wait_idle(program.pid)

        assert cpu.all_spent([program.pid]) - before >= 0.4


def test_an_unknown_load_is_refused():
    done = bench("speed")

    assert done.returncode == 2
    assert "no load is called 'speed'; there are server_cpu" in done.stderr


def test_an_interpreter_without_our_server_is_refused(tmp_path):
    done = bench("growth", "--server", str(tmp_path / "python"))

    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'python'} does not run our server\n"
