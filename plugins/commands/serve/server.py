"""The server's processes: rank 0 serves HTTP and plans the steps, and the other ranks follow."""

import logging
import resource
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from crosstrain import Config, Runner, UserError, log, os_errors_as
from crosstrain.distributed.launch.rendezvous import is_loopback
from crosstrain.distributed.launch.signals import StopRequest, exit_after_signal
from crosstrain.engine.build import make_runner
from crosstrain.inference.chat_form import ChatForm
from crosstrain.inference.decoder import Decoder
from crosstrain.inference.encoding import Encoders
from crosstrain.inference.open_checkpoint import load_model
from crosstrain.utils.logging import set_up_logging

from .limits import Limits
from .scheduler import Scheduler, run_follower


def serve_worker(plain: dict[str, Any], job: dict[str, Any], limits: Limits, under_launcher: bool) -> int:
    """Serve on this rank. job: the flags of `crosstrain serve`, and `trust`, how far the configuration is trusted."""
    stop = StopRequest(under_launcher)
    exit_after_signal(limits.grace_seconds)
    config = Config.from_plain(plain, trust=job["trust"])
    runner = make_runner(config)
    runner.setup()
    first = runner.world.rank == 0
    set_up_logging(None, quiet=not first)
    listener = listen(job["host"], job["port"]) if first else None
    load_model(config, runner, job["checkpoint"], job["weights"])
    with runner.evaluating():
        if listener is None:
            run_follower(Decoder(runner, limits.batch), runner.world.twin())
        else:
            run_server(config, runner, job, limits, listener, stop)
    runner.close()
    return 0


def run_server(
    config: Config, runner: Runner, job: dict[str, Any], limits: Limits, listener: socket.socket, stop: StopRequest
) -> None:
    """Serve HTTP in a second thread, and compute in this thread, until a signal arrives."""
    import uvicorn

    from .app import Web
    from .chat_format import chat_format
    from .connections import Connection
    from .service import Service

    checkpoint, name, host, key = (job[flag] for flag in ("checkpoint", "name", "host", "api_key"))
    group, encoders = runner.world.twin(), Encoders(checkpoint)
    tokenizer = encoders.tokenizer
    chats = chat_format(tokenizer, ChatForm.possible(config, checkpoint, encoders), encoders)
    service = Service(name, runner.model, tokenizer, chats, encoders, limits)
    scheduler = Scheduler(Decoder(runner, limits.batch), group, limits)
    web = Web(service, scheduler, tokenizer, key, host)
    allow_open_files(2 * limits.all_connections)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # `Web` logs errors
    server = uvicorn.Server(
        uvicorn.Config(
            web.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            http=partial(Connection, limits, {}),  # type: ignore[arg-type]
            proxy_headers=False,
            backlog=2048,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(limits.finish_seconds),
        )
    )
    with suppress(UserError):
        encoders.encode("text", "")  # start an encoder process now, so that the first request does not wait
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    if not is_loopback(host) and key is None:
        log.warning("warning: anyone who can reach %s can use this model; set --api-key to require a key", host)
    shown = f"[{host}]" if ":" in host else host
    address, served = f"http://{shown}:{listener.getsockname()[1]}", f"{name} ({checkpoint})"
    log.info("serving %s on %s; chat format: %s; press Ctrl-C to stop", served, address, chats.name)

    def stopping() -> bool:
        if stop and not server.should_exit:
            log.info("stopping")
            server.should_exit = True
        return bool(stop) or not thread.is_alive()

    scheduler.run(stopping)
    web.close()
    server.should_exit = True
    thread.join(limits.grace_seconds + 5)
    if not stop:
        raise UserError("the HTTP server stopped unexpectedly")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem = f"--host {host} --port {port}: cannot listen on this address"
    with os_errors_as(UserError, problem, OverflowError, UnicodeError):
        listener = socket.create_server((host, port), family=family, backlog=2048)
    # Connections inherit this option, which asyncio does not set. With it, the first token arrives 40 ms earlier.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def allow_open_files(wanted: int) -> None:
    """Raise the limit on open files and connections to `wanted`, or as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted:
        log.warning("warning: at most %d connections are possible; raise the limit on open files, `ulimit -Hn`", hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, hard)), hard))
