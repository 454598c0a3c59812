"""Data sets: from files to arrays, and their partition among simulated clients.

PRIVATE: may know the records of the simulation or hospital that calls it, and handles each by
itself (intake.py). A coordinator reads its test images here. Knows no model, mechanism, method or
message, and sends nothing.

A record's way, started by `load` in datasets.py: sources.py chooses the `Reader` of a layout
(`Folder` in reader.py, tables.py, arrays.py), which yields an undecoded `Item`. `take_records` in
intake.py makes it one of the `Records`, with `open_image` in images.py (and dicom.py). datasets.py
caches the split and holds out test images. partition.py deals records to clients. scikit-learn's
digits skip the files: `_digits` in datasets.py has `Records` already.
"""
