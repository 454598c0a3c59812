"""The broken training by patients that several tests must refute: it clips each record."""

from fed_dpsd.privacy import lattice


def clip_records_alone(patch, scale):
    """Clip a patient's records one by one and add them.

    A network's gradients of norm (N,) are multiplied by `scale` of the norm, and their sum is
    passed on as clipped.
    """
    linear_sum, single_gradients = lattice.linear_sum, lattice.single_gradients

    def of_records(layer, records, bound):
        inner = records.inner.diagonal(dim1=1, dim2=2).reshape(-1, 1, 1)
        inputs = records.inputs.flatten(0, 1)[:, None]
        return linear_sum(layer, lattice.Rows(inputs, inner, records.labels.flatten()), bound)

    def of_images(model, inputs, labels):
        count = inputs.shape[:2]
        labels = labels.view(count[0], -1).expand(count)
        *parts, norms = single_gradients(model, inputs.flatten(0, 1)[:, None], labels.flatten())
        scales = [scale(norms).float().view(-1, *[1] * (part.ndim - 1)) for part in parts]
        sums = [(p * s).unflatten(0, count).sum(1) for p, s in zip(parts, scales, strict=True)]
        return [*sums, norms.new_zeros(len(inputs))]

    patch.setattr(lattice, "linear_sum", of_records)
    patch.setattr(lattice, "single_gradients", of_images)
