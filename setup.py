"""Builds the data plane: plain C, no Python or torch header; loaded with ctypes."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "keepstep.training._plane",
            sources=sorted(glob("src/keepstep/training/plane/*.c")),
            depends=sorted(glob("src/keepstep/training/plane/*.h")),
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-fPIC",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
                "-pthread",
                "-Wall",
                "-Wextra",
            ],
            extra_link_args=["-pthread"],
        )
    ]
)
