"""How sqrt remat partitions a stack of layers into segments. No jax here: the planner counts with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Segments:
    """`count` segments of `length` layers, and one of `rest` layers where they do not divide.

    A rest of 0: there is none.
    """

    count: int
    length: int
    rest: int

    @property
    def total(self) -> int:
        """Segments in all: inputs that are kept from the forward pass."""
        return self.count + (self.rest > 0)

    @property
    def live(self) -> int:
        """The most block inputs at once: of every segment, and of every layer of the segment that is run again."""
        return self.total + self.length


def segment_layers(num_layers: int) -> Segments:
    """Choose the segments with the fewest block inputs at once (about 2 sqrt(N), Chen et al. 2016, section 4.3).

    Among equal ones it takes those without a rest, which compile one loop less, and then those with fewer segments:
    their inputs are in memory while the loss is computed. 48 layers are 6 x 8, 32 are 4 x 8, 7 are 4 and 3.
    """
    candidates = [Segments(num_layers // n, n, num_layers % n) for n in range(1, num_layers + 1)]
    return min(candidates, key=lambda one: (one.live, one.rest > 0, one.total))
