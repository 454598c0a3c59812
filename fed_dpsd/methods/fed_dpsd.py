"""FedDPSD: differentially private synthetic distillation from several clients' teachers.

Liu, Ge, Wang, Li, Liu: "Privacy-Preserving Model Transcription with Differentially Private
Synthetic Distillation", arXiv 2601.19090, Algorithm 2 (Appendix D).

A server owns a generator and a student. Each round it sends synthetic images with the student's
predictions; each client's teacher answers with normalised gradients, randomised-response labels or,
without privacy, probabilities; the server trains the student on the answers, and the generator
against the student alone, so the generator sees nothing private but what was released.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd import losses
from fed_dpsd.config import require, require_positive
from fed_dpsd.methods.method import (
    Bank,
    Charge,
    Federation,
    Plan,
    Round,
    Site,
    State,
    World,
    below,
    predict,
    to_unit,
)
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import top_k
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.protocol import Answer, Ask, Refusal, Total
from fed_dpsd.streams import Streams

SMALLEST_SHARE = 1e-6


@dataclass(frozen=True)
class FedDPSD:
    """Algorithm 2; the fields are conf/method/fed_dpsd.yaml."""

    latent_size: int
    noise_share: float
    generator_period: int
    generator_steps: int
    generator_learning_rate: float
    latent_learning_rate: float
    one_hot_weight: float
    entropy_weight: float
    activation_weight: float
    student_weight: float
    student_steps: int
    final_student_steps: int
    student_learning_rate: float
    class_balance: float
    batch_size: int
    balance: float
    label_step: float
    literal: bool

    def __post_init__(self) -> None:
        require(self, latent_size=1, generator_period=0, generator_steps=0, batch_size=2, balance=0)
        require(self, student_steps=1, final_student_steps=1, class_balance=0, noise_share=0)
        if self.noise_share > 1:
            raise ValueError(f"noise_share={self.noise_share} must be between 0 and 1")
        require_positive(
            self,
            "generator_learning_rate",
            "latent_learning_rate",
            "student_learning_rate",
            "label_step",
        )

    def plan(self, world: World) -> Plan:
        """One answer for each synthetic query, in one stage."""
        return Plan((Charge(world.mechanism, world.rounds * world.queries_per_round),))

    # --- client ------------------------------------------------------------------------------

    def client(self, ask: Ask, site: Site) -> Answer | Refusal:
        """Fed-FlexPer: the teacher's answer to every query, through the site's own mechanism."""
        sensitive = site.sensitive_probabilities(ask.images)
        if site.mechanism.input == "gradient":
            sensitive = losses.decoupled_kd_gradient(sensitive, ask.predictions, self.balance)
        return site.release(site.mechanism, sensitive, ask)

    # --- server ------------------------------------------------------------------------------

    def server(
        self, federation: Federation, world: World, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Algorithm 2, with trained latent vectors (Alg. 1) and a bank of answered samples."""
        players = _Players(self, world, streams)
        bank: list[Bank] = []
        if resume is not None:
            players.load(resume.tensors)
            bank = list(resume.bank)

        for number in range(len(bank) + 1, world.rounds + 1):
            if number > 1 and self.generator_period and (number - 1) % self.generator_period == 0:
                players.renew_generator(number)
            images = players.generate(number)
            predictions = predict(players.student, images, world.device)
            total = federation.total(Ask(number, images, predictions))
            if total.count == 0:  # every client's budget is spent
                return
            labels = self.noisy_labels(world, predictions, total)
            bank.append(Bank(images, predictions, labels.astype(np.float32)))
            metrics = {"student_loss": self.train_student(players, bank, number)}
            if number < world.rounds:
                metrics["generator_loss"] = self.train_generator(players, bank[-1])
            state = State(number, players.tensors(), bank)
            yield Round(state, players.student, metrics, total.refused)

    def noisy_labels(
        self, world: World, predictions: NDArray[np.float32], total: Total
    ) -> NDArray[np.float64]:
        """Eq. 6: labels (B, K) from the sum of the answers; post-processing, so free."""
        mean = total.sum / total.count
        if isinstance(world.mechanism, NormalizedGradient):  # Eq. 3
            bound = world.mechanism.bound
            return losses.noisy_label(predictions, mean, bound, self.label_step, self.literal)
        return mean  # Eq. 5: shares of the votes

    def train_student(self, players: "_Players", bank: list[Bank], number: int) -> float:
        """Eq. 7 for a new student, on batches drawn from the whole bank; returns the last loss.

        Each round starts from new weights: a student that goes on from its first few noisy labels
        never recovers from them.
        """
        world = players.world
        student = players.student = world.make_student(
            players.streams.torch("student", query_id=number)
        )
        steps = self.final_student_steps if number == world.rounds else self.student_steps
        optimiser = torch.optim.Adam(student.parameters(), self.student_learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        images = to_unit(np.concatenate([part.images for part in bank]), world.device)
        labels = torch.from_numpy(np.concatenate([part.labels for part in bank])).to(world.device)
        predictions = np.concatenate([part.predictions for part in bank])
        rng = players.streams.torch("replay", query_id=number)
        student.train()
        for _ in range(steps):
            chosen = torch.randint(len(images), (self.batch_size,), generator=rng)
            loss = self.student_loss(
                world, student(images[chosen]), labels[chosen], predictions[chosen]
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        self.balance_classes(student, images)
        return loss.item()

    @torch.no_grad()
    def balance_classes(self, student: nn.Module, images: torch.Tensor) -> None:
        """Take each class's share of the answered images out of the student's bias.

        The images' classes are out of balance, as they need not be in the world (post-hoc logit
        adjustment, arXiv 2007.07314, Sec. 4.1). It also brings rare classes into the top k.
        """
        logits = torch.cat([student(part) for part in images.split(1024)])
        shares = logits.softmax(1).mean(0).clamp_min(SMALLEST_SHARE)
        student.classifier.bias -= self.class_balance * (shares * len(shares)).log()

    def student_loss(
        self,
        world: World,
        logits: torch.Tensor,
        labels: torch.Tensor,
        predictions: NDArray[np.float32],
    ) -> torch.Tensor:
        """L_s: the votes' likelihood for randomised responses, else the cross-entropy of Eq. 7."""
        mechanism = world.mechanism
        if isinstance(mechanism, TopKRandomizedResponse) and not self.literal:
            members = torch.from_numpy(top_k(predictions, mechanism.size)).to(logits)
            return losses.response_loss(logits, labels, members, mechanism.lie_probability)
        return losses.student_loss(logits, labels)

    def train_generator(self, players: "_Players", answered: Bank) -> float:
        """Eq. 8 and L_s, for the generator and its latent vectors, against the student alone."""
        student, generator, world = players.student, players.generator, players.world
        student.requires_grad_(False)
        generator.train()
        drawn = slice(players.noise_images, None)  # the generator's own images, after the noise
        labels = torch.from_numpy(answered.labels[drawn]).to(world.device)
        predictions = answered.predictions[drawn]
        loss = torch.zeros(())  # where generator_steps is 0
        for batch in players.batches():
            latents = players.latents[batch].clone().requires_grad_(True)
            latent_optimiser = torch.optim.Adam([latents], self.latent_learning_rate)
            for _ in range(self.generator_steps):
                features = student.features(generator(latents))
                logits = student.classifier(features)
                loss = (
                    self.student_weight
                    * self.student_loss(world, logits, labels[batch], predictions[batch])
                    + self.one_hot_weight * losses.one_hot_loss(logits)
                    + self.entropy_weight * losses.entropy_loss(logits)
                    + self.activation_weight * losses.activation_loss(features)
                )
                players.generator_optimiser.zero_grad()
                latent_optimiser.zero_grad()
                loss.backward()
                players.generator_optimiser.step()
                latent_optimiser.step()
            players.latents[batch] = latents.detach()
        student.requires_grad_(True)
        return loss.item()


class _Players:
    """The server's student, generator and latent vectors, and their tensors."""

    def __init__(self, method: FedDPSD, world: World, streams: Streams) -> None:
        self.method, self.world, self.streams = method, world, streams
        self.student = world.make_student(streams.torch("student"))
        self.noise_images = round(method.noise_share * world.queries_per_round)
        self.renew_generator(0)

    def renew_generator(self, number: int) -> None:
        """Draw a new generator and new latent vectors."""
        self.generator = self.world.make_generator(
            self.method.latent_size, self.streams.torch("generator", query_id=number)
        )
        self.generator_optimiser = torch.optim.Adam(
            self.generator.parameters(), self.method.generator_learning_rate, betas=(0.5, 0.999)
        )
        self.latents = torch.randn(
            (self.world.queries_per_round - self.noise_images, self.method.latent_size),
            generator=self.streams.torch("latents", query_id=number),
        ).to(self.world.device)

    def batches(self) -> list[slice]:
        """The latent vectors, in batches."""
        size = self.method.batch_size
        return [slice(start, start + size) for start in range(0, len(self.latents), size)]

    @torch.no_grad()
    def generate(self, number: int) -> NDArray[np.uint8]:
        """(Q, C, H, W) images, as bytes: what the student and the clients both see.

        Noise images come first, then one image for each latent vector.
        """
        self.generator.train()
        drawn = [self.generator(self.latents[batch]) for batch in self.batches()]
        images = [(part * 255).round().to(torch.uint8).cpu().numpy() for part in drawn]
        rng = self.streams.numpy("noise images", query_id=number)
        shape = (self.noise_images, *self.world.image_shape)
        return np.concatenate([rng.integers(0, 256, shape, dtype=np.uint8), *images])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything a resumed server needs, by name; copies."""
        named = {"latents": self.latents}
        named |= {f"student.{name}": t for name, t in self.student.state_dict().items()}
        named |= {f"generator.{name}": t for name, t in self.generator.state_dict().items()}
        for index, state in self.generator_optimiser.state_dict()["state"].items():
            named |= {f"optimiser.{index}.{name}": t for name, t in state.items()}
        return {name: tensor.detach().clone() for name, tensor in named.items()}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Undo `tensors`."""
        self.latents = tensors["latents"].to(self.world.device)
        self.student.load_state_dict(below("student", tensors))
        self.generator.load_state_dict(below("generator", tensors))
        states: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in below("optimiser", tensors).items():
            index, _, key = name.partition(".")
            states.setdefault(int(index), {})[key] = tensor
        groups = self.generator_optimiser.state_dict()["param_groups"]
        self.generator_optimiser.load_state_dict({"state": states, "param_groups": groups})
