"""The benchmarks run, and say what was measured; how fast anything was is not judged here."""

import json
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from dflockd.sharding import stable_hash_shard
from dflockd.wire.requests import COMMANDS
from examples.demo import stage

if sys.platform != "linux":
    pytest.skip("the benchmarks are for Linux", allow_module_level=True)

import dflockd
from benchmarks import (
    callgrind,
    cpu,
    gaps,
    interpreters,
    published,
    record,
    report,
    storms,
)
from benchmarks.bench import LeftOutError
from benchmarks.callgrind import Callgrind, by_place
from benchmarks.calls import C_FUNCTIONS, calls
from benchmarks.child import Child
from benchmarks.loads import NAMES
from benchmarks.loads.shard_map import PING, Asker

BOUND = 90
# Those that are done soon, and need neither Redis nor anything of PyPI.
CHEAP = ["held_keys", "two_servers"]


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

    assert {"lock-memory", "growth-cpu", "growth-latency", "two-servers"} <= topics.keys()
    for topic in topics.values():
        assert topic["ours"] in topic["figures"]
        for values in topic["figures"].values():
            assert len(values) == document["rounds"] == 2
        for ratio in topic["ratios"].values():
            assert ratio["spread"] >= 0.0
            assert ratio["least"] <= ratio["median"] <= ratio["most"]


def test_the_terminal_shows_figures_and_goals(document):
    assert "Memory of a held lock, without its connection (B)" in document["printed"]
    assert "≥ 1.7 " in document["printed"]


def test_the_page_is_made_from_the_record(document):
    page = report.pages(document)[report.PAGE]

    [growth] = [topic for topic in document["topics"] if topic["key"] == "growth-cpu"]
    assert f"**{report.number(growth['ratios']['10 held']['median'])}**" in page
    assert report.NOT_MEASURED in page  # of the loads that did not run
    assert document["commit"] in page
    assert report.MARKED.sub("", page) == report.MARKED.sub("", report.PAGE.read_text())


@pytest.mark.skipif(not record.RESULTS.exists(), reason="nothing is recorded here")
def test_the_page_has_the_figures_of_the_latest_full_run():
    for path, text in report.pages(record.read()).items():
        assert text == path.read_text(), "run: python -m benchmarks.report"


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

        one = of_a_turn(2_000, (10, 60))
        assert of_a_turn(20_000, (10, 20)) == pytest.approx(10 * one, rel=0.05)
        assert of_a_turn(2_000, (10, 20)) == pytest.approx(one, rel=0.02)


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


def test_calls_are_counted_by_whose_they_are():
    def turns(number):
        for _ in range(number):
            len("")
            stable_hash_shard("key", 3)

    found = calls(turns, 4)

    assert found["dflockd.sharding"] == 1
    assert found[__name__.partition(".")[0]] == 1 / 4
    assert found[C_FUNCTIONS] == calls(turns, 8)[C_FUNCTIONS] > 1


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


@pytest.mark.parametrize("gap", gaps.GAPS, ids=lambda gap: gap.key)
def test_a_gap_is_found_under_every_load_by_one_client(gap, tmp_path, monkeypatch):
    monkeypatch.setattr(gaps, "STORM", 0.02)
    monkeypatch.setattr(gaps, "NEWER", 0.2)
    with ExitStack() as stack:
        server = stack.enter_context(stage.LockServer(tmp_path, *gap.flags))
        prober = stack.enter_context(gaps.Prober.at(server))
        connections = stack.enter_context(ExitStack())

        assert gap.run(gaps.Crowd(server, connections), prober, 5) > 0.0


def test_every_command_has_a_storm():
    assert {command.decode() for command in COMMANDS} <= set(storms.STORMS)


def test_a_storm_asks_for_what_there_is(tmp_path):
    """What is refused at once would cost a server nothing."""
    refused = {"auth", "identify", "listen", "malformed", "shards", "stable-ref"}
    with stage.LockServer(tmp_path, *gaps.UNBOUNDED) as server, ExitStack() as stack:
        crowd = gaps.Crowd(server, stack)
        storms.gather(crowd.connect(), 3)
        for number, (name, requests) in enumerate(storms.STORMS.items()):
            client, replies = storms.Client(number, crowd.connect(), requests), []
            for _ in range(4 * len(requests)):
                client.ask()
                while (reply := client.hear()) is None:
                    pass
                replies.append(reply)
            errors = sum(1 for reply in replies if reply.startswith(b"error"))
            assert name in refused or errors <= len(replies) / 2, (name, replies)


def test_a_gap_is_as_long_as_the_server_is_away(tmp_path):
    with (
        stage.LockServer(tmp_path) as server,
        gaps.Prober.at(server) as prober,
        prober.watching() as found,
    ):
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(server.pid, signal.SIGCONT)

    assert found[0] > 200


def test_an_asker_asks_as_often_as_it_is_told_or_answered(tmp_path):
    with stage.LockServer(tmp_path) as server, Asker.at(server, 7) as asker:
        assert 0 < asker.run(PING, 0.5, 20) <= 24
        assert asker.run(PING, 0.2) > 0

        server.kill()
        with pytest.raises(stage.StageError, match="ended"):
            asker.run(PING, 0.2)


class Stingy(socketserver.ThreadingTCPServer):
    """Gives each connection 700 holds, and refuses the others."""

    daemon_threads = True

    class RequestHandlerClass(socketserver.StreamRequestHandler):
        def handle(self):
            had = 0
            while self.rfile.readline():
                key, _ = self.rfile.readline(), self.rfile.readline()
                had += 1
                self.server.keys.append(key)
                self.wfile.write(b"ok token 3600\n" if had <= 700 else b"error_max_holds\n")

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)
        self.keys = []
        self.port = self.server_address[1]


def test_holds_that_a_server_refuses_go_to_another_connection_and_key():
    with Stingy() as server, ExitStack() as stack:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)

        connections = gaps.Crowd(server, stack).hold(1500)

        assert len(connections) == 3
        assert set(server.keys) == {b"held-0\n", b"held-1\n", b"held-2\n"}


def test_an_unknown_load_is_refused():
    done = bench("speed")

    assert done.returncode == 2
    assert "no load is called 'speed'; there are server_cpu" in done.stderr


def test_an_interpreter_without_our_server_is_refused(tmp_path):
    done = bench("held_keys", "--server", str(tmp_path / "python"))

    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'python'} does not run our server\n"


@pytest.mark.timeout(5 * BOUND)
def test_a_large_cluster_is_run_through_all_that_happens_to_it():
    options = ("--servers", "3", "--locks", "1024", "--restarts", "1")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster_scale", *options],
        capture_output=True,
        check=False,
        text=True,
        cwd=stage.ROOT,
        timeout=4 * BOUND,
    )
    assert run.returncode == 0, run.stderr
    lines = {line[:20].strip(): line for line in run.stdout.splitlines()}
    assert [*lines] == ["start", "rest", "join", "rolling restart", "crash", "all stop and start"]
    assert all("transactions" in line and "CPU of a server" in line for line in lines.values())
