"""Creates the data of the small AppWorld in the format of the official AppWorld data.

    python small.py FOLDER

The script runs in the virtual environment of the package appworld, and imports only `families.py`
from this project. Every run creates identical files.

Twelve people sign up for three apps and create contacts, notes and alarms with the apps' public
APIs. No API creates the records about a task's owner, the person who gives the instruction, so
these records are written directly to a database.
"""

import json
import os
import random
import re
import sys
import warnings
from datetime import datetime
from pathlib import Path

FOLDER = Path(sys.argv[1]).resolve()
os.environ["APPWORLD_ROOT"] = str(FOLDER)  # the package reads this variable when it is imported
sys.path.insert(0, str(Path(__file__).parent))
warnings.filterwarnings("ignore")

from appworld.apps import get_all_apps  # noqa: E402
from appworld.apps.api_lib import CompanyNotifier  # noqa: E402
from appworld.apps.model_lib import CachedDBHandler  # noqa: E402
from appworld.collections.api_docs import ApiDocCollection  # noqa: E402
from appworld.collections.models import ModelCollection  # noqa: E402
from appworld.common.constants import DB_VERSION  # noqa: E402
from appworld.requester import Requester  # noqa: E402
from families import HOURS, IDEAS, JOBS, LINES, SEEN, UNSEEN, Draft, solution  # noqa: E402

PEOPLE = ("Ada Quist", "Bela Norr", "Cleo Varga", "Dina Holt", "Emil Sato", "Fay Lund",
          "Gus Perrin", "Hana Brook", "Ivo Castell", "Jun Madsen", "Kira Fenn", "Leo Tamm")
FIELDS = ("first_name", "last_name", "email", "phone_number")  # fields of a contact and an owner
HOME = ":memory:small"
RECORDED = datetime(2024, 2, 1, 9)  # the time at which contacts, notes and alarms are created
TODAY = datetime(2024, 3, 4, 10)    # the current time in all tasks
SCENARIOS = {  # maps each split to its task families and the number of scenarios per family
    "train": (SEEN, 6), "validation": (SEEN, 3), "test": (SEEN, 3), "unseen": (UNSEEN, 7)}
VARIANTS = 3  # number of tasks per scenario, as in the official data
EVALUATION = '''\
import json


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    wants = private_data["wants"]
    with test("the task is completed, with the right answer"):
        test.answer(json.loads(models.end.supervisor.Task.first().answer), ground_truth_answer)
    with test("what had to change has changed, nothing else"):
        test.case(sorted(models.changed_model_names()), "==", sorted(wants))
    with test("the records are as they had to become"):
        for table, want in wants.items():
            compare(test, models, table, want.get("added", []), dict(want.get("updated", [])))


def compare(test, models, table, wanted_new, wanted):
    added, updated, removed = models.changed_records(table)
    test.case(len(added), "==", len(wanted_new))
    test.case(len(removed), "==", 0)
    test.case(sorted(record.id for record in updated), "==", sorted(wanted))
    for record in updated:
        ignored = ["record_hash", "updated_at"]
        names = models.changed_field_names(table, record.id, ignore=ignored)
        test.case(sorted(names), "==", sorted(wanted[record.id]))
        equal(test, record, wanted[record.id])
    for record, fields in zip(sorted(added, key=lambda record: record.id), wanted_new):
        equal(test, record, fields)


def equal(test, record, fields):
    for name, value in fields.items():
        test.case(getattr(record, name), "==", value)
'''
TESTS = re.findall(r'with test\("(.+)"\)', EVALUATION)


def sign_up(call, name: str, number: int) -> dict:
    """Creates a person's accounts in the apps, logs in, and returns the person.

    The person has `passwords` and `tokens`, each a dict with the apps as keys.

    Args:
        call: Function that calls an API. Its arguments are the name of the app, the name of the
            API, and the arguments of the API as keyword arguments.
        name: First and last name.
        number: Number of the person, used in the phone number and in the passwords.
    """
    first, last = name.split()
    person = dict(first_name=first, last_name=last, phone_number=f"555{number:07}",
                  email=f"{first}.{last}@post.example.com".lower(), passwords={}, tokens={})
    for app in ("phone", "gmail", "simple_note"):
        login = "phone_number" if app == "phone" else "email"
        password = f"{app}-{first}-{number}"
        call(app, "signup", first_name=first, last_name=last, password=password,
             **{login: person[login]})
        if app == "simple_note":
            call(app, "verify_account", email=person["email"],
                 verification_code=emailed_code(call, person["tokens"]["gmail"]))
        answer = call(app, "login", username=person[login], password=password)
        person["passwords"][app] = password
        person["tokens"][app] = answer["access_token"]
    return person


def emailed_code(call, token: str) -> str:
    """Returns the verification code in the newest email."""
    threads = call("gmail", "show_inbox_threads", access_token=token)
    # Select the newest email by its id, because all emails have the same time.
    newest = max(thread["email_thread_id"] for thread in threads)
    answer = call("gmail", "show_thread", access_token=token, email_thread_id=newest)
    return re.search(r"code is: (\S+)", answer["emails"][-1]["body"])[1]


def add_records(call, person: dict, people: list[dict], rng: random.Random) -> None:
    person |= dict(contacts=[], alarms=[], notes=[])

    def create(kind: str, app: str, api: str, **row) -> None:
        answer = call(app, api, access_token=person["tokens"][app], **row)
        id = f"{kind.removesuffix('s')}_id"
        person[kind].append(row | {id: answer[id]})

    others = [other for other in people if other is not person]
    for other in rng.sample(others, 7):
        fields = {name: other[name] for name in FIELDS}
        create("contacts", "phone", "add_contact", relationships=["friend"], **fields)
    for label in rng.sample(JOBS, rng.randint(4, 7)):
        create("alarms", "phone", "create_alarm", label=label, time=rng.choice(HOURS))
    for title in rng.sample(IDEAS, 6):
        content = "\n".join(rng.sample(LINES, 2))
        create("notes", "simple_note", "create_note", title=title, content=content)


def write(path: Path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) if path.suffix == ".json" else content)


def write_task(data: Path, id: str, person: dict, draft: Draft) -> None:
    """Writes the files of a task: the start state, the instruction, the tests and the solution."""
    CachedDBHandler.reset("/supervisor.db")  # remove the owner of the previous task
    models = ModelCollection.load(HOME, str(data / "base_dbs"), get_all_apps())
    supervisor = models.supervisor
    fields = {name: person[name] for name in FIELDS}
    owner = supervisor.Supervisor.create_save(**fields, birthday="1990-01-01")
    for app, password in person["passwords"].items():
        supervisor.AccountPassword.create_save(
            supervisor_id=owner.id, account_name=app, password=password)
    supervisor.Task.create_save(supervisor_id=owner.id, instruction=draft.text)

    folder = data / "tasks" / id
    models.save(str(folder / "dbs"), format="changes", save_model_hashes=True)
    write(folder / "specs.json", dict(
        instruction=draft.text, supervisor=fields, datetime=TODAY.isoformat(),
        db_version=DB_VERSION))
    steps = solution(person, draft)
    truth = {"public_data": {}, "private_data": dict(wants=draft.wants), "answer": draft.answer,
             "required_apps": draft.apps, "api_calls": [],
             # The package computes a missing number of code lines with the code formatter black,
             # which it does not install.
             "metadata": dict(mode="full", difficulty=1, num_apps=len(draft.apps),
                              num_apis=len(steps), num_api_calls=len(steps),
                              num_solution_code_lines=len(steps)),
             "test_data": [dict(requirement=test, label="no_op_fail") for test in TESTS]}
    for name, content in truth.items():
        write(folder / "ground_truth" / f"{name}.json", content)
    write(folder / "ground_truth/evaluation.py", EVALUATION)
    code = "\n".join(steps).replace("\n", "\n    ")
    source = f"def solution(apis, requester):\n    {code}\n"
    write(folder / "ground_truth/compiled_solution.py", source)


def write_documents(data: Path) -> None:
    names = tuple(get_all_apps(skip_admin=True))
    for app, documents in ApiDocCollection.build(names).items():
        marked = {api: document | dict(canary_string="") for api, document in documents.items()}
        write(data / "api_docs/standard" / f"{app}.json", marked)


def drafts(people: list[dict], rng: random.Random):
    """Yields (split, id, person, draft) for each task. No person gives an instruction twice."""
    drawn = set()
    for split, (families, scenarios) in SCENARIOS.items():
        for family in families:
            name = family.__name__.replace("_", "-")
            for number in range(scenarios * VARIANTS):
                key = None
                while key is None or key in drawn:
                    person = rng.choice(people)
                    draft = family(person, rng)
                    key = person["email"], draft.text
                drawn.add(key)
                scenario, variant = divmod(number, VARIANTS)
                yield split, f"{name}-{split}-{scenario + 1}_{variant + 1}", person, draft


def make(data: Path) -> None:
    rng = random.Random("AppWorld's small world")
    models = ModelCollection.load(HOME, HOME, get_all_apps(), create_db=True)
    requester = Requester(HOME, HOME, RECORDED, load_apps=get_all_apps(), raise_on_failure=True)
    call = requester.request
    # The note app sends verification codes from this account.
    CompanyNotifier("Simple Note").create_accounts(on_phone=False)
    people = [sign_up(call, name, number) for number, name in enumerate(PEOPLE, 1)]
    for person in people:
        add_records(call, person, people, rng)
    models.save(str(data / "base_dbs"), save_model_hashes=True)
    write_documents(data)
    CachedDBHandler.reset()

    splits = {split: [] for split in SCENARIOS}
    for split, id, person, draft in drafts(people, rng):
        write_task(data, id, person, draft)
        splits[split].append(id)
    for split, ids in splits.items():
        write(data / "datasets" / f"{split}.txt", "\n".join(ids) + "\n")


if __name__ == "__main__":
    make(FOLDER / "data")
