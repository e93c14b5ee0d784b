import pytest
from writing import SCHEDULERS, build


@pytest.fixture(params=SCHEDULERS)
def kind(request):
    return request.param


@pytest.fixture
def pipe(kind):
    return build(kind)
