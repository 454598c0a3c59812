"""The plan of a run: its cost to a client, as `privacy plan` prints it."""

from dataclasses import dataclass

from fed_dpsd.accounts.account import budget_text, needed_budget
from fed_dpsd.accounts.card import how_answered, how_trained, plan_of, privacy_card
from fed_dpsd.accounts.words import PrivacyCard, published_line, sentences
from fed_dpsd.experiment import Experiment, calibrated_axis


@dataclass(frozen=True)
class PlannedRun:
    """The cost of a run to a client, before anything is read or spent.

    Args:
        experiment: the experiment that would run.
        queries_per_client: number of synthetic images, or requests for sums, that each client would
            answer.
        privacy: the published epsilon and every proven one.
        smallest_budget: the smallest privacy.budget that pays for the whole run; `inf` if none
            does.
    """

    experiment: Experiment
    queries_per_client: int
    privacy: PrivacyCard
    smallest_budget: float

    def __str__(self) -> str:
        """Return the text that `fed-dpsd privacy plan` prints."""
        settings, axis = self.experiment.config.privacy, calibrated_axis(self.experiment)
        lines = [*sentences(self.privacy, self.experiment.seeded), ""]
        lines.append(f"training: {how_trained(self.experiment)}")
        lines.append(f"answers: {how_answered(self.experiment)}")
        if settings.target_epsilon is not None:
            mechanism = getattr(self.experiment, axis)
            unit = getattr(mechanism, "unit", "record")
            target = f"privacy.target_epsilon={settings.target_epsilon:g} ({unit}, add_remove)"
            value = getattr(mechanism, mechanism.calibrated_by)
            lines.append(f"calibrated to {target}: {axis}.{mechanism.calibrated_by}={value:.6g}")
        asked = "queries" if self.experiment.answers.from_teachers else "sums"
        lines.append(f"{asked} per client: {self.queries_per_client:,}")
        if self.privacy.covers_nothing:
            return "\n".join(lines)
        stated = self.privacy.content["epsilon_stated"]
        lines.append(f"epsilon stated by the paper: {'none' if stated is None else stated}")
        lines.append(published_line(self.privacy))
        lines += [f"epsilon planned: {text}" for text in self.privacy.claims]
        lines.append(f"budget: {budget_text(settings, self.smallest_budget)}")
        notes = dict.fromkeys(note for epsilon in self.privacy.proven for note in epsilon.notes)
        lines.append(f"notes: {', '.join(notes)}")
        if self.privacy.content["reason"]:
            lines.append(f"reason: {self.privacy.content['reason']}")
        return "\n".join(lines)

    __repr__ = __str__


def planned_run(experiment: Experiment) -> PlannedRun:
    """Return the cost of an experiment, without reading data or spending anything."""
    planned = plan_of(experiment)
    card = PrivacyCard(privacy_card(experiment, planned), "planned")
    budget = needed_budget(experiment.config.privacy, planned)
    return PlannedRun(experiment, planned.queries, card, budget)
