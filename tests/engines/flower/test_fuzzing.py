"""Mutated messages each way: no crash, nothing uncharged, no rejection without a reason."""

import json
import math
import shutil
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, RecordDict
from hypothesis import strategies as st

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.client.hospital import open_hospital
from fed_dpsd.engines.flower import client
from fed_dpsd.engines.flower.codec import (
    ANSWER,
    DIAGNOSE,
    HELLO,
    LONGEST_REASON,
    STEP,
    Reply,
    pack_replies,
    pack_request,
    pack_steps,
    unpack_step,
)
from fed_dpsd.errors import UserError
from fed_dpsd.privacy.secure_sum import Party, SumError, public_key
from fed_dpsd.protocol import Refusal, Response, SumStep
from fed_dpsd.server.charge_log import ChargeLog
from tests.hospitals import (
    DISTRIBUTED,
    Hospitals,
    federate,
    request,
    site_file,
    summing,
)
from tests.ledgers import entries_of

EXAMPLES = [75, pytest.param(500, marks=pytest.mark.slow(seconds=10))]
CHARGES = 50  # after which a hospital gets a new ledger: its budget would refuse the rest

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_subnormal=False)
    | st.sampled_from(["", "nobody", "server", "..", "/etc/passwd", "\0", "x" * 10_000])
    | st.text(max_size=20)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
RECORDED = (  # what a ConfigRecord may hold
    st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_subnormal=False)
    | st.text(max_size=20)
    | st.binary(max_size=64)
    | st.booleans()
    | st.lists(st.integers(-5, 5), max_size=4)
    | st.lists(st.binary(max_size=8), max_size=4)
)
DTYPES = ("uint8", "int64", "uint64", "float16", "float32", "float64", "complex64", "bool")
ODD_DTYPES = (*DTYPES, "U4", "M8[s]", "O", "nonsense")


@st.composite
def arrays(draw):
    """An array of any type and shape, of plausible values or not; or bytes that claim to be one."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 4, 8, 10]), max_size=5)))
    value = draw(st.sampled_from([0, 1, -1, 255, math.nan, math.inf, 1e300, 0.1]))
    if draw(st.booleans()):
        with np.errstate(all="ignore"):
            return Array(np.full(shape, value).astype(draw(st.sampled_from(DTYPES))))
    dtype = draw(st.sampled_from(ODD_DTYPES))
    content = draw(st.binary(max_size=200))
    return Array(dtype, shape, draw(st.sampled_from(["numpy.ndarray", "pickle"])), content)


def mutate_json(draw, text):
    """A JSON text with another value, without one, cut off, or something else altogether."""
    how = draw(st.sampled_from(["value", "value", "value", "gone", "cut", "other", "deep"]))
    if how == "deep":
        return "[" * 100_000
    if how == "other":
        return draw(st.text(max_size=50))
    if how == "cut":
        return text[: draw(st.integers(0, len(text) - 1))]
    try:
        tree = parent = json.loads(text) or {"1": "no"}
    except (ValueError, RecursionError):  # broken before
        return text
    if not isinstance(tree, dict):
        return text
    while True:
        key = draw(st.sampled_from(sorted(parent)))
        if not (isinstance(parent[key], dict) and parent[key] and draw(st.booleans())):
            break
        parent = parent[key]
    if how == "gone":
        del parent[key]
    else:
        parent[key] = draw(JSON)
    return json.dumps(tree)


def mutate(draw, content, *text_keys):
    """A message's records with up to three things wrong; under `text_keys` they hold JSON."""
    for _ in range(draw(st.integers(1, 3))):
        if not content:
            return
        name = draw(st.sampled_from(sorted(content)))
        record = content[name]
        how = draw(st.sampled_from(["drop", "replace", "entry", "entry", "entry", "entry"]))
        if how == "drop":
            del content[name]
        elif how == "replace":
            content[name] = draw(
                st.sampled_from([ArrayRecord(), ConfigRecord(), ConfigRecord({"x": 1})])
            )
        elif len(record):
            key = draw(st.sampled_from(sorted(record)))
            if draw(st.integers(0, 9)) == 0:
                del record[key]
            elif isinstance(record, ArrayRecord):
                record[key] = draw(arrays())
            elif key in text_keys and isinstance(record[key], str) and record[key]:
                record[key] = mutate_json(draw, record[key])
            else:
                record[key] = draw(RECORDED)


def run(examples, test):
    """`test` on so many examples, the same every time."""
    settings = hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(hypothesis.given(st.data())(test))()


def asks_of(file):
    """Digests of the requests that a hospital was charged for."""
    return [entry.request for entry in entries_of(open_hospital(file).ledger)]


@pytest.mark.slow
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("kind", ["answers", "steps"])
def test_a_hospital_takes_any_message(deployed, tmp_path, caplog, kind, examples):
    """Answers are charged, rejections are not, and every rejection has a reason."""
    caplog.set_level("CRITICAL")
    experiment = deployed(*DISTRIBUTED)
    file = summing(tmp_path, budget=1e6)[0]
    context = SimpleNamespace(node_config={"site": str(file)})
    outcomes = {"answered": 0, "refused": 0}

    def test(data):
        query = request(1, 4)
        step = SumStep(query.digest, (0, 1))
        content = pack_request(query) if kind == "answers" else pack_steps({0: step})
        content["meta"] = ConfigRecord(
            {
                "experiment": experiment.to_json(),
                "run_folder": "/runs/run",
                "clients": [0],
                "code": client.code_digest(),
            }
        )
        mutate(data.draw, content, "experiment", "acknowledged")
        expected = ANSWER if kind == "answers" else STEP
        named = data.draw(st.sampled_from([expected] * 7 + [HELLO, DIAGNOSE, "query.evil"]))
        message = Message(content, dst_node_id=1, message_type=named)
        message.metadata.__dict__["_message_id"] = "1"
        before = asks_of(file)
        reply = client.answer_message(message, context).content
        new = asks_of(file)[len(before) :]
        assert reply["meta"]["error"] == ""
        (reason,) = json.loads(str(reply["refused"]["reasons"])).values() or [""]
        values = reply["values"]
        if named == HELLO:
            assert not values
            assert not reason
            assert not new
        elif reason:
            outcomes["refused"] += 1
            assert not values
            assert not new
        else:
            outcomes["answered"] += 1
            if named == ANSWER:
                sent = client.unpack_request(content)
                assert sent.digest in asks_of(file)
                assert values["0"].numpy().shape == sent.predictions.shape
        if len(before) > CHARGES:
            shutil.rmtree(open_hospital(file).folder / "ledger")

    run(examples, test)
    assert outcomes["refused"] > examples / 3
    if kind == "answers":
        assert outcomes["answered"] > examples / 100


@pytest.mark.parametrize("examples", EXAMPLES)
def test_the_coordinator_takes_any_reply(deployed, tmp_path, caplog, examples):
    """A hospital's reply does not change another's; its own is bounded or ignored."""
    caplog.set_level("CRITICAL")
    experiment = deployed("training=plain", "answers=label")
    files = [site_file(tmp_path / f"hospital{n}", n, budget=1e6) for n in (0, 1)]
    grid = Hospitals(files)
    federation = federate(experiment, grid)
    query = request()
    federation.each(query)
    honest = federation.each(query)  # a repeated reply states no new charge
    assert all(isinstance(given, Response) for given in honest.values())
    kept = {
        node: next(
            reply
            for reply in reversed(grid.replies.values())
            if reply.metadata.src_node_id == node and reply.metadata.message_type == ANSWER
        )
        for node in grid.files
    }
    outcomes = {Response: 0, Refusal: 0}

    def test(data):
        def reply_of(node, number):
            metadata = Metadata(1, "", node, 0, number, "", 0.0, 1.0, ANSWER)
            if node == 101 and data.draw(st.integers(0, 19)) == 0:
                code = data.draw(st.sampled_from([0, 1, 2, 6, 7, 8]))
                return Message(
                    error=Error(code, data.draw(st.none() | st.text())), metadata=metadata
                )
            records = {name: kept[node].content[name].copy() for name in kept[node].content}
            content = RecordDict(records)
            if node == 101:
                mutate(data.draw, content, "reasons", "1")
            return Message(content=content, metadata=metadata)

        replies = {}

        def push(messages):
            for message in messages:
                number = str(len(replies))
                replies[number] = reply_of(message.metadata.dst_node_id, number)
            return list(replies)[-len(messages) :]

        fuzzed = SimpleNamespace(
            get_node_ids=grid.get_node_ids,
            push_messages=push,
            pull_messages=lambda numbers: [replies[number] for number in numbers],
        )
        federation._grid = fuzzed
        given = federation.each(query)
        assert np.array_equal(given[0].values, honest[0].values)
        outcomes[Refusal if isinstance(given[1], Refusal) else Response] += 1
        if isinstance(given[1], Refusal):
            assert given[1].reason
            assert len(given[1].reason) <= LONGEST_REASON
        else:
            values = given[1].values
            assert values.shape == query.predictions.shape
            assert np.isfinite(values.astype(float)).all()
            assert set(values.sum(axis=1)) <= {0, 1}
            assert given[1].teachers == 1

    run(examples, test)
    assert min(outcomes.values()) > examples / 20
    charge_log = ChargeLog(federation._run_folder, experiment.plan.releases)
    assert charge_log.clients[0].charged == {"label": 16}
    assert len(charge_log.charged) <= 2
    card = privacy_card(experiment, experiment.plan, (), charge_log.charged, charge_log.notes())
    assert all(float(row["epsilon"]) >= 1_920 for row in card["proven"])


class Summers:
    """A grid of three honest parties of secure sums; what 102 replies is mutated by `spoil`."""

    def __init__(self):
        private = [bytes([number + 1]) * 32 for number in range(3)]
        keys = {number: public_key(key) for number, key in enumerate(private)}
        self.parties = [Party(number, private[number], keys, 2) for number in range(3)]
        self.values = np.arange(3 * 160).reshape(3, 16, 10)
        self.spoil = lambda content: None
        self.replies = {}

    def get_node_ids(self):
        return [100, 101, 102]

    def push_messages(self, messages):
        for message in messages:
            number, node = str(len(self.replies)), message.metadata.dst_node_id
            content = self.reply(message.metadata.message_type, message.content, node - 100)
            about = {"code": client.code_digest(), "error": "", "client": node - 100}
            about["classes"] = [str(label) for label in range(10)]
            content["meta"] = ConfigRecord(about)
            if node == 102 and message.metadata.message_type != HELLO:
                self.spoil(content)
            metadata = Metadata(1, "", node, 0, number, "", 0.0, 1.0, ANSWER)
            self.replies[number] = Message(content=content, metadata=metadata)
        return list(self.replies)[-len(messages) :]

    def pull_messages(self, numbers):
        return [self.replies[number] for number in numbers]

    def reply(self, kind, content, number):
        if kind == HELLO:
            return pack_replies({})
        party = self.parties[number]
        if kind == ANSWER:
            masked = party.mask(self.values[number], b"tag")
            boxes = {str(other): box for other, box in masked.sealed.items()}
            return pack_replies({number: Reply(masked.values, boxes)})
        step = unpack_step(content, number)
        try:
            if not step.proofs:
                proofs = party.confirm(b"tag", step.named)
                boxes = {str(other): proof for other, proof in proofs.items()}
            else:
                opened = party.unmask(b"tag", step.named, step.proofs, step.sealed)
                boxes = {str(other): share for other, share in opened.own.items()}
                boxes |= {f"{a} {b}": share for (a, b), share in opened.between.items()}
        except SumError as error:
            return pack_replies({number: Refusal(0, str(error))})
        return pack_replies({number: Reply(boxes=boxes)})


@pytest.mark.slow
@pytest.mark.parametrize("examples", EXAMPLES)
def test_the_coordinator_takes_any_reply_in_a_secure_sum(deployed, caplog, examples):
    """The reply is left out, changes the sum like any value, or keeps it closed, an error."""
    caplog.set_level("CRITICAL")
    experiment, grid = deployed(*DISTRIBUTED), Summers()
    federation, query = federate(experiment, grid), request()
    honest = grid.values[:2].sum(axis=0) * experiment.answers.lattice
    outcomes = {"left out": 0, "summed": 0, "closed": 0}

    def test(data):
        def spoil(content):
            if data.draw(st.booleans()):
                mutate(data.draw, content, "reasons")
            elif "boxes 2" in content:  # shares and proofs of the right length
                boxes = content["boxes 2"]
                content["boxes 2"] = ConfigRecord({to: boxes[to][::-1] for to in boxes})

        grid.spoil = spoil
        shutil.rmtree(federation._sums, ignore_errors=True)
        try:
            total = federation.total(query)
        except UserError as problem:
            error = str(problem)
        else:
            error = ""
        if error:
            assert "no part of it was revealed" in error
            outcomes["closed"] += 1
            return
        assert total.sum.shape == query.predictions.shape
        if total.count == 2:
            assert np.array_equal(total.sum, honest)
            assert set(total.refused) <= {2}
        outcomes["left out" if total.count == 2 else "summed"] += 1

    run(examples, test)
    assert min(outcomes.values()) > examples / 100, outcomes
