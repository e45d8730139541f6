"""Real services on loopback for runs on other machines: a bucket, a server over ssh, and a link that can be cut."""

import getpass
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress

import pytest

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Link:
    """A link to a port, which can be cut and mended; ``n_passed`` bytes went through to the service."""

    def __init__(self, port):
        self.to, self.n_passed, self.is_cut, self._open = port, 0, False, set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self):
        self.is_cut = True
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self):
        self.is_cut = False

    def close(self):
        self.cut()
        self._listener.close()

    def _serve(self):
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                here.close()
                continue
            there = socket.create_connection(("127.0.0.1", self.to))
            self._open |= {here, there}
            for source, sink, counts in ((here, there, True), (there, here, False)):
                threading.Thread(target=self._pass, args=(source, sink, counts), daemon=True).start()

    def _pass(self, source, sink, counts):
        with suppress(OSError):
            while content := source.recv(1 << 16):
                self.n_passed += len(content) * counts
                sink.sendall(content)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            self._open.discard(one)


@contextmanager
def bucket(monkeypatch):
    """An S3 service of moto with a bucket; the environment names it, as for any other service."""
    server_of = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    link = Link(port)
    for name, value in {"AWS_ACCESS_KEY_ID": "planted", "AWS_SECRET_ACCESS_KEY": "planted-secret",
                        "AWS_DEFAULT_REGION": "us-east-1",
                        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import boto3

    # Its backend belongs to the process, and keeps what an earlier server was given.
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")).close()
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="runs")
    try:
        yield link
    finally:
        link.close()
        server.stop()


@contextmanager
def ssh_server(folder, monkeypatch):
    """A server over ssh with a throw-away key, known to this user's configuration in a folder of its own."""
    pytest.importorskip("paramiko")
    if SSHD is None:
        pytest.skip("sshd is not installed")
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    for name in ("host_key", "home/.ssh/id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    keys = home / ".ssh" / "authorized_keys"
    shutil.copy(home / ".ssh" / "id_ed25519.pub", keys)
    port = free_port()
    link = Link(port)
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nAuthorizedKeysFile {keys}\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nMaxStartups 100\nSubsystem sftp internal-sftp\n"
        "PasswordAuthentication no\n"
    )
    os.makedirs("/run/sshd", exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=subprocess.DEVNULL)
    host_key = (folder / "host_key.pub").read_text().split()
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{link.port} {host_key[0]} {host_key[1]}\n")
    (home / ".ssh" / "config").write_text(
        f"Host far\n  HostName 127.0.0.1\n  Port {link.port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {home}/.ssh/id_ed25519\n"
    )
    monkeypatch.setenv("HOME", str(home))
    try:
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield link
    finally:
        link.close()
        server.terminate()
        server.wait()
