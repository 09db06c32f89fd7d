"""What tests of sources share."""

import numpy as np
import pytest


def message_of(error_type, call, *args, **kwargs):
    """The error's message, which has to be one line."""
    with pytest.raises(error_type) as error:
        call(*args, **kwargs)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def as_rows(images, labels):
    """Examples as a sorted list of (pixels, label): equal whatever their order."""
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def check_contract(dataset):
    for images, labels in [dataset[1:3], dataset[3:5]]:
        assert images.dtype == np.uint8
        assert images.ndim == 4
        assert labels.dtype == np.int32
        assert labels.shape == images.shape[:1]
        assert 0 <= labels.min() <= labels.max() < dataset.num_classes
    assert set(dataset.train_labels.tolist()) == set(range(dataset.num_classes))
