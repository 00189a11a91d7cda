"""Videos for rewards that score images: some frames of each are scored, and the mean is the video's score."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from flow_grpo.base.pixels import some_frames
from flow_grpo.rewards.scores import SomeFailed

Item = TypeVar("Item")


class Frames(NamedTuple):
    """Some frames of videos."""

    images: Tensor  # [B * N, 3, H, W], those of a video are neighbours
    of_each: int  # N, of each video

    def repeat(self, values: Sequence[Item]) -> list[Item]:
        """Return what belongs to the videos, B values, for each of their frames."""
        repeated = []
        for value in values:
            repeated += [value] * self.of_each
        return repeated

    def score(self, score_images: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the videos' scores by name, [B] each, of what a call returns for the frames, [B * N] each. The score
        of each frame is a figure beside the mean, by its place among those that are scored: frame_1 is the first.

        Raises:
            SomeFailed: a frame has no score, nor has its video.
        """
        try:
            return self._of_videos(score_images())
        except SomeFailed as error:
            raise SomeFailed(str(error), self._of_videos(error.scores)) from error

    def _of_videos(self, scores: dict[str, Tensor]) -> dict[str, Tensor]:
        by_name = {}
        for name, values in scores.items():
            by_name[name] = values.view(-1, self.of_each).mean(1)
        of_frames = scores["score"].view(-1, self.of_each)
        for place, values in enumerate(of_frames.unbind(1), 1):
            by_name[f"frame_{place}"] = values
        return by_name


def is_video(images: Tensor) -> bool:
    """Tell videos [B, f, 3, H, W] from images [B, 3, H, W]."""
    return images.ndim == 5


def frames_of(videos: Tensor, most: int) -> Frames:
    """Choose at most `most` frames of videos [B, f, 3, H, W], see `some_frames`."""
    frames = some_frames(videos, most)
    return Frames(frames.flatten(0, 1), frames.shape[1])
