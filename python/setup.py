"""Sets the tag of the wheel: the package contains a shared library, but no Python extension module."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.dist import Distribution


class BinaryDistribution(Distribution):
    """A distribution that is installed to the platform-specific folder."""

    def has_ext_modules(self) -> bool:
        return True


class TaggedWheel(bdist_wheel):
    """A wheel for every Python 3 on x86-64 Linux with glibc 2.28 or later."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", "manylinux_2_28_x86_64"


setup(distclass=BinaryDistribution, cmdclass={"bdist_wheel": TaggedWheel})
