"""The settings of uneven clients, `system.*`: every key with its default, its meaning and what it accepts."""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from fedjax_ssl.options import SET, Count, Fraction, Model, Rate, ReadWhere, Weight


class PrivacySettings(Model):
    """User-level differential privacy of the global model. By default there is none."""

    clip: Weight = Field(
        default=0.0,
        description="Largest Euclidean norm S of a client's update; a longer one is shortened to it, and all clients of a "
        "round count alike. 0 does not shorten them. Usual is about the median norm, which `diagnostics.clients_every` shows.",
    )
    noise: Annotated[Weight, ReadWhere(clip=SET)] = Field(
        default=0.0,
        description="Noise multiplier z: normal noise of the standard deviation z S / M is added to the mean update of the M "
        "clients of a round. 0 adds none. Larger ones give more privacy, a smaller epsilon, and a less accurate model.",
    )

    @pydantic.model_validator(mode="after")
    def _noise_is_for_a_clip(self) -> Self:
        if self.noise and not self.clip:
            accepted = "0, or a clip, of which it is a multiple"
            raise ValueError(f"privacy.noise: got {self.noise:g} with privacy.clip=0, accepted: {accepted}")
        return self


class SystemSettings(Model):
    """System heterogeneity: clients that are slow, late, away, drop out or are faulty. By default there is none."""

    participation: Literal["uniform", "weighted", "available", "async"] = Field(
        default="uniform",
        description="Which clients a round draws: all with the same probability (`uniform`), each with a probability "
        "proportional to its number of examples (`weighted`), or uniformly among those that can be reached when the round "
        "begins (`available`, which needs `trace`). With `async` rounds are asynchronous (FedBuff): all clients are drawn with "
        "the same probability, `concurrency` of them train at any time, and the server steps whenever `cohort_size` updates "
        "have arrived.",
    )
    concurrency: Annotated[Count, ReadWhere(participation=("async",))] = Field(
        default=0,
        description="Number of clients that train at any time in asynchronous rounds, a multiple of `cohort_size`. 0 means "
        "twice `cohort_size`. A round is a step of the server, except the first `concurrency` / `cohort_size` ones, which only "
        "let clients begin.",
    )
    staleness: Annotated[Weight, ReadWhere(participation=("async",))] = Field(
        default=0.5,
        description="Exponent a of the factor (1 + s)^-a of an update that arrives s steps of the server after its client has "
        "begun. 0 makes late updates count as much as others.",
    )
    trace: str = Field(
        default="",
        description="When each client can be reached: the path of a CSV file with the columns client, start and end in "
        "seconds, or `diurnal` for a window of the day that is drawn for each client. If it is empty, clients can always be "
        "reached.",
    )
    round_s: Annotated[Rate, ReadWhere(trace=SET)] = Field(
        default=600.0, description="Seconds in the trace between the beginnings of two successive rounds."
    )
    period_s: Annotated[Rate, ReadWhere(trace=SET)] = Field(
        default=86_400.0, description="Seconds after which the trace repeats; 86,400 are a day."
    )
    window_s: Annotated[Rate, ReadWhere(trace=("diurnal",))] = Field(
        default=28_800.0, description="Seconds of each day for which a client can be reached, with the trace `diurnal`."
    )
    spread_s: Annotated[Weight, ReadWhere(trace=("diurnal",))] = Field(
        default=10_800.0,
        description="Standard deviation in seconds, over clients, of the time at which a client's window begins, with the "
        "trace `diurnal`. On average a window begins at 20/24 of `period_s`, which is 8 p.m. for a period of a day.",
    )
    dropout: Fraction = Field(
        default=0.0,
        description="Probability that a client of a round drops out after it has received the model, so that its update never "
        "arrives.",
    )
    speed: Weight = Field(
        default=0.0,
        description="Number of examples that the median client passes forward through the network in a second. 0 means that "
        "computing takes no time.",
    )
    speed_sigma: Annotated[float, Field(ge=0, le=10), ReadWhere(speed=SET)] = Field(
        default=0.0,
        description="Spread of the clients' speeds, as the standard deviation of their natural logarithms. 0 makes all clients "
        "equally fast.",
    )
    up: Weight = Field(
        default=0.0,
        description="Number of bytes that the median client sends to the server in a second. 0 means that sending takes no "
        "time.",
    )
    down: Weight = Field(
        default=0.0,
        description="Number of bytes that the median client receives from the server in a second. 0 means that receiving takes "
        "no time.",
    )
    bandwidth_sigma: Annotated[float, Field(ge=0, le=10), ReadWhere(up=SET), ReadWhere(down=SET)] = Field(
        default=0.0,
        description="Spread of the clients' rates of sending and of receiving, as the standard deviation of their natural "
        "logarithms. 0 makes all clients alike.",
    )
    file: str = Field(
        default="",
        description="Path of a CSV file with the rates of each client, in the columns client, examples_per_s, up_bytes_per_s "
        "and down_bytes_per_s. It takes the place of `speed`, `up`, `down` and their spreads.",
    )
    deadline_s: Weight = Field(
        default=0.0,
        description="Seconds after the beginning of a round at which the server stops waiting for clients. 0 means that it "
        "waits for all of them.",
    )
    late: Annotated[Literal["dropped", "shortened"], ReadWhere(deadline_s=SET)] = Field(
        default="dropped",
        description="What happens to a client that would miss the deadline: it is left out of the round (`dropped`), or it "
        "takes fewer local steps, so that its update arrives in time (`shortened`).",
    )

    faulty: Fraction = Field(
        default=0.0,
        description="Share of all clients that are faulty: the clients with the highest numbers, in every round in which they "
        "take part.",
    )
    fault: Annotated[Literal["sign_flip", "noise", "labels"], ReadWhere(faulty=SET)] = Field(
        default="sign_flip",
        description="What a faulty client does: it sends its update times -`fault_scale` (`sign_flip`), adds normal `noise` to "
        "it, whose norm is about `fault_scale` times that of the update, or trains on wrong `labels`, C - 1 - y in place of "
        "each label y of C classes.",
    )
    fault_scale: Annotated[Rate, ReadWhere(faulty=SET, fault=("sign_flip", "noise"))] = Field(
        default=1.0, description="Size of the wrong update of a faulty client, as a factor of its own update."
    )

    @property
    def is_timed(self) -> bool:
        """Whether seconds are simulated."""
        return bool(self.file or self.speed or self.up or self.down)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.participation == "available" and not self.trace:
            raise ValueError("system.participation: got available without system.trace, accepted: a trace, or another word")
        if self.participation == "async":
            if not self.is_timed:
                accepted = "with system.speed, system.up, system.down or system.file"
                raise ValueError(f"system.participation: got async where no client needs time, accepted: {accepted}")
            for key in ("trace", "deadline_s", "dropout"):  # clients begin at any time, and the server waits for all of them
                if got := getattr(self, key):
                    shown = f"{got:g}" if isinstance(got, float) else got
                    raise ValueError(f"system.participation: got async with system.{key}={shown}, accepted: without")
        medians = {key: getattr(self, key) for key in ("speed", "up", "down")}
        if self.file and any(medians.values()):
            key, got = next((key, got) for key, got in medians.items() if got)
            raise ValueError(f"system.{key}: got {got:g} with system.file={self.file}, accepted: 0, or no file")
        if self.deadline_s and not self.is_timed:
            accepted = "0, or system.speed, system.up, system.down or system.file"
            raise ValueError(f"system.deadline_s: got {self.deadline_s:g} where no client needs time, accepted: {accepted}")
        if self.trace == "diurnal" and self.window_s > self.period_s:
            raise ValueError(f"system.window_s: got {self.window_s:g}, accepted: at most system.period_s = {self.period_s:g}")
        return self
