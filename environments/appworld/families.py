"""The task families of the small AppWorld.

A family is a function that returns a random task for a person. A person is a dict with the
contacts, alarms and notes that `small.py` has created. Each step of a solution is the code of one
reply, and makes one API call.
"""

import random
from dataclasses import dataclass, field

LOOK = ('passwords = {row["account_name"]: row["password"]'
        " for row in apis.supervisor.show_account_passwords()}\nprint(passwords)")
ALARMS = "alarms = apis.phone.show_alarms(access_token=token, page_limit=20)\nprint(alarms)"
DONE = "apis.supervisor.complete_task()"
ANSWER = "apis.supervisor.complete_task(answer=answer)"
HOURS = [f"{hour:02}:{minute:02}" for hour in range(4, 23) for minute in (5, 20, 35, 50)]
JOBS = ("Water the ferns", "Call the dentist", "Feed the cat", "Take the bins out",
        "Stretch", "Start the bread", "Read to Mika", "Check the oven", "Walk the dog",
        "Leave for the bus", "Practise the flute", "Ring the bakery")
IDEAS = ("Trip to the lake", "Garden plan", "Birthday list", "Soup for Sunday", "Choir dates",
         "Shed repairs", "Books to lend", "Quiz questions", "Names for the boat", "Film night")
LINES = ("bring two blankets", "ask about the ladder", "order it before Friday",
         "the blue one was better", "there is more in the cellar", "count them once again")


@dataclass
class Draft:
    """A task whose files have not been written yet.

    Attributes:
        apps: Apps that the solution uses.
        steps: Code of the solution, one item for each reply, without the steps that `solution`
            adds.
        wants: {table: changes that the solution must make}. The changes are {"added": [fields of a
            new record, ...]} or {"updated": [(id of a record, its new fields), ...]}.
        answer: The correct answer, or None if the task needs no answer.
    """
    text: str
    apps: list[str]
    steps: list[str]
    wants: dict[str, dict] = field(default_factory=dict)
    answer: str | int | None = None


def login(app: str, person: dict) -> str:
    name = person["phone_number" if app == "phone" else "email"]
    return (f'token = apis.{app}.login(username="{name}", password=passwords["{app}"])'
            '["access_token"]')


def solution(person: dict, draft: Draft) -> list[str]:
    """Returns all steps of a solution. The first two read the passwords and log in to the first
    app."""
    start = [LOOK, login(draft.apps[0], person)]
    return [*start, *draft.steps, DONE if draft.answer is None else ANSWER]


def find_contact(name: str) -> str:
    return (f'people = apis.phone.search_contacts(access_token=token, query="{name}")\n'
            f'print(people)\nfriend = next(row for row in people if row["first_name"] == "{name}")')


def alarm_new(person: dict, rng: random.Random) -> Draft:
    labels = {alarm["label"] for alarm in person["alarms"]}
    label = rng.choice([job for job in JOBS if job not in labels])
    time = rng.choice(HOURS)
    return Draft(
        f'Set an alarm on my phone for {time} and label it "{label}".', ["phone"],
        [f'print(apis.phone.create_alarm(access_token=token, time="{time}", label="{label}"))'],
        {"phone.Alarm": dict(added=[dict(time=time, label=label, enabled=True)])})


def alarm_count(person: dict, rng: random.Random) -> Draft:
    hour = rng.choice(("08:00", "10:00", "12:00", "15:00", "18:00", "20:00"))
    side = rng.choice(("before", "after"))
    sign = "<" if side == "before" else ">"
    times = [alarm["time"] for alarm in person["alarms"]]
    return Draft(
        f"How many alarms on my phone are set to a time {side} {hour}?", ["phone"],
        [f'{ALARMS}\nanswer = sum(row["time"] {sign} "{hour}" for row in alarms)'],
        answer=sum(time < hour if side == "before" else time > hour for time in times))


def contact_number(person: dict, rng: random.Random) -> Draft:
    contact = rng.choice(person["contacts"])
    name = contact["first_name"]
    return Draft(
        f"What is the phone number of {name} {contact['last_name']}, one of my contacts?",
        ["phone"], [f'{find_contact(name)}\nanswer = friend["phone_number"]'],
        answer=contact["phone_number"])


def note_more(person: dict, rng: random.Random) -> Draft:
    note = rng.choice(person["notes"])
    title, line = note["title"], rng.choice(LINES)
    content = f"{note['content']}\n{line}"
    return Draft(
        f'Add the line "{line}" at the end of my note "{title}".', ["simple_note"],
        [f'notes = apis.simple_note.search_notes(access_token=token, query="{title}")\n'
         f'print(notes)\nnote = next(row for row in notes if row["title"] == "{title}")',
         'print(apis.simple_note.add_content_to_note(access_token=token, note_id=note["note_id"], '
         f'append_or_prepend="append", added_content="{line}"))'],
        {"simple_note.Note": dict(updated=[(note["note_id"], dict(content=content))])})


def alarm_move(person: dict, rng: random.Random) -> Draft:
    alarm = rng.choice(person["alarms"])
    label, id = alarm["label"], alarm["alarm_id"]
    time = rng.choice([hour for hour in HOURS if hour != alarm["time"]])
    return Draft(
        f'Move my phone\'s alarm "{label}" to {time}.', ["phone"],
        [f'{ALARMS}\nalarm = next(row for row in alarms if row["label"] == "{label}")',
         'print(apis.phone.update_alarm(access_token=token, alarm_id=alarm["alarm_id"], '
         f'time="{time}"))'],
        {"phone.Alarm": dict(updated=[(id, dict(time=time))])})


def number_noted(person: dict, rng: random.Random) -> Draft:
    contact = rng.choice(person["contacts"])
    name = contact["first_name"]
    title = f"Number of {name}"
    return Draft(
        f'Write a note with the title "{title}" whose content is the phone number of '
        f"{name} {contact['last_name']}, nothing else; my phone's contacts have it.",
        ["phone", "simple_note"],
        [find_contact(name), login("simple_note", person),
         f'print(apis.simple_note.create_note(access_token=token, title="{title}", '
         'content=friend["phone_number"]))'],
        {"simple_note.Note": dict(added=[dict(title=title, content=contact["phone_number"])])})


SEEN = (alarm_new, alarm_count, contact_number, note_more)
UNSEEN = (alarm_move, number_noted)
