"""Redis, the lock server, two workers and two beats, each a container, on a network of their own."""

import pytest
from pytest_celery import (
    CeleryTestSetup,
    CeleryWorkerCluster,
    CeleryWorkerContainer,
    RedisContainer,
)
from pytest_docker_tools import container, fxtr

from tests.smoke import engine, tasks

pytest_plugins = ["celery_dflock.contrib.pytest_celery"]


class Worker(CeleryWorkerContainer):
    """A worker from the image of the examples, which carries the two distributions."""

    @classmethod
    def command(cls, *args, **more):
        return super().command(*args, "--concurrency=2", **more)

    @classmethod
    def tasks_modules(cls):
        return {tasks}


def app_container(**more):
    return container(
        image=engine.WORKER,
        environment=fxtr("default_worker_env"),
        network="{default_pytest_celery_network.name}",
        volumes={"{default_worker_volume.name}": {"bind": "/app", "mode": "ro"}},
        tmpfs={"/tmp": ""},
        read_only=True,
        timeout=60,
        **more,
    )


default_worker_container = app_container(
    wrapper_class=Worker, command=fxtr("default_worker_command")
)
second_worker_container = app_container(
    wrapper_class=Worker, command=fxtr("default_worker_command")
)
BEAT = [
    "celery",
    "-A",
    "app",
    "beat",
    "-S",
    "dflock",
    "--schedule=/tmp/schedule",
    "--pidfile=",
    "-lINFO",
]
first_beat = app_container(command=BEAT)
second_beat = app_container(command=BEAT)


@pytest.fixture
def default_worker_container_cls():
    return Worker


@pytest.fixture
def celery_worker_cluster(celery_worker, default_worker_cls, second_worker_container):
    second = default_worker_cls(second_worker_container, celery_worker.app)
    return CeleryWorkerCluster(celery_worker, second)


@pytest.fixture(params=["celery_redis_broker"])
def celery_broker(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["celery_redis_backend"])
def celery_backend(request):
    return request.getfixturevalue(request.param)


class Redis(RedisContainer):
    """Also found where the tests themselves run in a container: then it is not on localhost."""

    @property
    def host_url(self):
        port = self.port
        return f"redis://{self.get_addr('6379/tcp')[0]}:{port}/{self.vhost}"


def redis_container():
    return container(
        image=engine.REDIS,
        command=Redis.command(),
        ports=Redis.ports(),
        network="{default_pytest_celery_network.name}",
        wrapper_class=Redis,
        timeout=60,
    )


default_redis_broker = redis_container()
default_redis_backend = redis_container()


class Setup(CeleryTestSetup):
    @classmethod
    def update_app_config(cls, app):
        # What is changed here is what the containers get too.
        app.conf.beat_schedule = {"tick": {"task": "tick", "schedule": 1.0}}


@pytest.fixture
def celery_setup_cls():
    return Setup
