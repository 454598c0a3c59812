"""Hospitals to test with: their files, and a grid on which each runs the real client code."""

import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

import client_app
from fed_dpsd.accounts.secret import exchange_key, load_or_create_secret
from fed_dpsd.client import site as sites
from fed_dpsd.client.hospital import open_hospital
from fed_dpsd.client.terms import NotAllowed
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.privacy.secure_sum import public_key
from fed_dpsd.protocol import Refusal, Request
from fed_dpsd.server.run_folder import new_run_folder
from tests.ledgers import entries_of

RNG = np.random.Generator(np.random.PCG64(0))
IMAGES = RNG.integers(0, 256, (40, 8, 8), dtype=np.uint8)


def private_key(key):
    """The content of a file with a private key, as ssh-keygen writes it."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def certificate(key, days=30):
    """The content of a certificate file signed by a key; it expires after the given days."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    now = datetime.datetime.now(datetime.UTC)
    builder = builder.not_valid_before(now - datetime.timedelta(days=60))
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def site_file(folder, client=0, **changes):
    """A hospital's folder with forty digits of noise; returns its site file."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.arange(40) % 10
    np.savez(folder / "scans.npz", image=IMAGES, label=labels, patient=labels // 2)
    settings = {
        "name": "noise",
        "client": client,
        "num_clients": 2,
        "state": "state",
        "files": {
            "path": "scans.npz",
            "image_column": "image",
            "label_column": "label",
            "patient_column": None,
            "skip_unreadable": False,
        },
        "shape": [1, 8, 8],
        "classes": [str(label) for label in range(10)],
        "budget": 100.0,
        "delta": 1e-5,
        "queries": 1_000,
        "threads": 1,
        "methods": ["fed_dpsd"],
        "training": ["plain", "dp_sgd"],
        "answers": ["label", "gradient", "probabilities"],
        "models": ["cnn", "scattering"],
        "trust": ["nobody"],
        "keys": [],
        "colluding": 0,
        "limits": {},
    }
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(settings | changes))
    return path


class Hospitals:
    """A deployment's grid: a node a hospital, each with the real client code and its own file."""

    def __init__(self, files, break_reply=lambda node, reply: reply):
        self.files = {100 + number: file for number, file in enumerate(files)}
        self.offline = set()
        self.break_reply = break_reply
        self.replies = {}

    def get_node_ids(self):
        return [node for node in self.files if node not in self.offline]

    def push_messages(self, messages):
        for message in messages:
            node = message.metadata.dst_node_id
            number = f"{len(self.replies)}"
            message.metadata.__dict__["_message_id"] = number
            self.replies[number] = None
            if node not in self.offline:
                context = SimpleNamespace(node_config={"site": str(self.files[node])})
                reply = client_app.app(message, context)
                reply.metadata.__dict__["_src_node_id"] = node
                self.replies[number] = self.break_reply(node, reply)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, numbers):
        return [self.replies[number] for number in numbers if self.replies[number]]


def federate(experiment, grid):
    return GridFederation(experiment, grid, new_run_folder(experiment))


def answer(hospital, text, query, run="run"):
    """What leaves a hospital for a request."""
    try:
        experiment = hospital.experiment(text, len(query.images))
        return sites.answer(experiment.method, query, hospital.open(experiment, run))
    except NotAllowed as error:
        return Refusal(0, str(error))


def request(query_id=1, count=16):
    rng = np.random.Generator(np.random.PCG64(query_id))
    images = rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    return Request(query_id, images, rng.dirichlet(np.ones(10), count).astype(np.float32))


def summing(tmp_path, clients=3, **changes):
    """Hospitals that trust a threshold, and know each other's keys."""
    keys = []
    for client in range(clients):
        secret = load_or_create_secret(tmp_path / f"hospital{client}" / "state" / "secret")
        keys.append(public_key(exchange_key(secret)).hex())
    settings = {"num_clients": clients, "trust": ["threshold"], "keys": keys, "colluding": 0}
    return [
        site_file(tmp_path / f"hospital{client}", client, **settings | changes)
        for client in range(clients)
    ]


DISTRIBUTED = (
    *("num_clients=3", "training=plain", "answers=gradient", "answers.noise_at=distributed"),
    "answers.quorum={threshold: 2, colluding: 0}",
)
PLAIN = ("training=plain", "answers=gradient")


def site_files(tmp_path, count=2, **changes):
    """The files of hospitals 0, 1, ..., each in its own folder."""
    return [site_file(tmp_path / f"hospital{n}", n, **changes) for n in range(count)]


def charges(file):
    """The kinds of a hospital's charges; the file is its site file, or the hospital itself."""
    hospital = open_hospital(file) if isinstance(file, Path) else file
    return [entry.kind for entry in entries_of(hospital.ledger)]
