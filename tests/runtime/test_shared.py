"""What is set for the whole process while a run trains is put back by the last of several runs."""

import os
import threading

from jaxtrain.runtime.files import files_for_the_group


def umask():
    found = os.umask(0o077)
    os.umask(found)
    return found


def test_files_stay_those_of_the_group_until_the_last_of_two_runs_has_ended():
    before = os.umask(0o022)
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first():
        with files_for_the_group():
            first_is_in.set()
            second_is_in.wait(20)
        first_is_out.set()

    try:
        thread = threading.Thread(target=first)
        thread.start()
        first_is_in.wait(20)
        with files_for_the_group():
            second_is_in.set()
            first_is_out.wait(20)
            inside = umask()
        thread.join(20)
        assert (inside, umask()) == (0o027, 0o022)
        with files_for_the_group():
            assert umask() == 0o027
    finally:
        os.umask(before)
