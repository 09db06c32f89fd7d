"""The settings of uneven clients, `system.*`: every key with its default, its meaning and what it accepts."""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from fedjax_ssl.options import SET, Fraction, Model, Rate, ReadWhere, Weight


class SystemSettings(Model):
    """System heterogeneity: clients that are slow, late, away or drop out, in simulated seconds. By default there is none."""

    participation: Literal["uniform", "weighted", "available"] = Field(
        default="uniform",
        description="Who is drawn: all alike, by number of examples, or all alike among those who can be reached.",
    )
    trace: str = Field(
        default="", description="When clients can be reached: a CSV file `client,start,end`, or `diurnal`; empty: always."
    )
    round_s: Annotated[Rate, ReadWhere(trace=SET)] = Field(
        default=600.0, description="Seconds of the trace from one round's begin to the next one's."
    )
    period_s: Annotated[Rate, ReadWhere(trace=SET)] = Field(
        default=86_400.0, description="Seconds after which the trace repeats."
    )
    window_s: Annotated[Rate, ReadWhere(trace=("diurnal",))] = Field(
        default=28_800.0, description="`diurnal`: for how long a client can be reached each day."
    )
    spread_s: Annotated[Weight, ReadWhere(trace=("diurnal",))] = Field(
        default=10_800.0, description="`diurnal`: standard deviation of when that begins, about 20 of 24 hours."
    )
    dropout: Fraction = Field(
        default=0.0, description="Probability that a client drops out of a round after it has received the model."
    )
    speed: Weight = Field(
        default=0.0,
        description="Examples that a client passes forward in a second, median over clients; 0: that takes no time.",
    )
    speed_sigma: Annotated[float, Field(ge=0, le=10), ReadWhere(speed=SET)] = Field(
        default=0.0, description="Standard deviation of its logarithm over clients."
    )
    up: Weight = Field(default=0.0, description="Bytes that a client sends in a second, median over clients; 0: no time.")
    down: Weight = Field(default=0.0, description="Bytes that it receives in a second, likewise.")
    bandwidth_sigma: Annotated[float, Field(ge=0, le=10), ReadWhere(up=SET), ReadWhere(down=SET)] = Field(
        default=0.0, description="Standard deviation of the logarithms of both over clients."
    )
    file: str = Field(
        default="",
        description="In place of these five: a CSV file `client,examples_per_s,up_bytes_per_s,down_bytes_per_s`.",
    )
    deadline_s: Weight = Field(default=0.0, description="Seconds after which the server waits for no client; 0: it waits.")
    late: Annotated[Literal["dropped", "shortened"], ReadWhere(deadline_s=SET)] = Field(
        default="dropped",
        description="A client that would miss the deadline is dropped, or takes fewer local steps, so that it ends in time.",
    )

    @property
    def is_timed(self) -> bool:
        """Whether seconds are simulated."""
        return bool(self.file or self.speed or self.up or self.down)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.participation == "available" and not self.trace:
            raise ValueError("system.participation: got available without system.trace, accepted: a trace, or another word")
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
