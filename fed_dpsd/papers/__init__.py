"""The papers' algorithms as printed, with code that only they use.

They are written like plug-ins: the core never imports them, and conf/ names them by `_target_`.
Here methods may know what methods/ may, and trainings what privacy/ may. For some nothing is proven
(docs/mechanisms.md), and their cards say so.
"""
