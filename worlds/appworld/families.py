"""What the tasks of the small world ask for: a family a function, which draws one for a person.

A person is what `small.py` has filed about one in the apps. The code of a solution is a list of
steps with one call each, as an agent would write them, a reply a step.
"""

import random
from dataclasses import dataclass, field

LOOK = 'passwords = {row["account_name"]: row["password"]\n' \
       "             for row in apis.supervisor.show_account_passwords()}\nprint(passwords)"
DONE = "apis.supervisor.complete_task()"
TELL = "apis.supervisor.complete_task(answer=answer)"
HOURS = [f"{hour:02}:{minute:02}" for hour in range(4, 23) for minute in (5, 20, 35, 50)]
THINGS = ("batteries", "candles", "skis", "tent pegs", "paint rollers", "jam jars", "bike pump",
          "string lights", "board games", "spare keys", "rain boots", "sewing kit")
JOBS = ("Water the ferns", "Call the dentist", "Feed the cat", "Take the bins out",
        "Stretch", "Start the bread", "Read to Mika", "Check the oven", "Walk the dog",
        "Leave for the bus", "Practise the flute", "Ring the bakery")
IDEAS = ("Trip to the lake", "Garden plan", "Birthday list", "Soup for Sunday", "Choir dates",
         "Shed repairs", "Books to lend", "Quiz questions", "Names for the boat", "Film night")
LINES = ("bring two blankets", "ask about the ladder", "order it before Friday",
         "the blue one was better", "there is more in the cellar", "count them once again")
MOODS = ("Slow Sunday", "Rainy Desk", "Long Drive", "Kitchen Dance", "Early Train", "Late Lamp",
         "Paint and Hum", "Snow Walk", "Harbour Lights", "Twelve Candles")
KINDS = ("friend", "coworker", "neighbor", "cousin")


@dataclass
class Draft:
    """A task before it is filed. wants: table -> what changes there: `added`, fields of each;
    `updated`, id -> fields; `removed`, ids."""
    text: str
    apps: list[str]
    steps: list[str]
    wants: dict[str, dict] = field(default_factory=dict)
    answer: str | int | None = None


def login(app: str, person: dict) -> str:
    name = person["phone_number" if app == "phone" else "email"]
    return (f'token = apis.{app}.login(username="{name}",\n'
            f'    password=passwords["{app}"])["access_token"]')


def changing(person: dict, app: str, text: str, calls: list[str], **wants: dict) -> Draft:
    """A task that changes one app."""
    return Draft(text, [app], [LOOK, login(app, person), *calls, DONE], wants)


def asking(person: dict, app: str, text: str, calls: list[str], answer) -> Draft:
    """A task that asks something one app knows."""
    return Draft(text, [app], [LOOK, login(app, person), *calls, TELL], answer=answer)


# --------------------------------------------------------------------------------------- alarms

ALARMS = "alarms = apis.phone.show_alarms(access_token=token, page_limit=20)\nprint(alarms)"


def found_alarm(label: str) -> str:
    return f'{ALARMS}\nalarm = next(row for row in alarms if row["label"] == "{label}")'


def alarm_new(person: dict, rng: random.Random) -> Draft:
    labels = {alarm["label"] for alarm in person["alarms"]}
    label = rng.choice([job for job in JOBS if job not in labels])
    time = rng.choice(HOURS)
    return changing(
        person, "phone", f'Set an alarm on my phone for {time} and label it "{label}".',
        [f'print(apis.phone.create_alarm(access_token=token, time="{time}", label="{label}"))'],
        **{"phone.Alarm": dict(added=[dict(time=time, label=label, enabled=True)])})


def alarm_off(person: dict, rng: random.Random) -> Draft:
    alarm = rng.choice([alarm for alarm in person["alarms"] if alarm["enabled"]])
    return changing(
        person, "phone", f'Switch off the alarm on my phone that is labelled "{alarm["label"]}".',
        [found_alarm(alarm["label"]),
         'print(apis.phone.update_alarm(access_token=token, alarm_id=alarm["alarm_id"],\n'
         "                              enabled=False))"],
        **{"phone.Alarm": dict(updated={alarm["alarm_id"]: dict(enabled=False)})})


def alarm_move(person: dict, rng: random.Random) -> Draft:
    alarm = rng.choice(person["alarms"])
    time = rng.choice([hour for hour in HOURS if hour != alarm["time"]])
    return changing(
        person, "phone", f'Move my phone\'s alarm "{alarm["label"]}" to {time}.',
        [found_alarm(alarm["label"]),
         'print(apis.phone.update_alarm(access_token=token, alarm_id=alarm["alarm_id"],\n'
         f'                              time="{time}"))'],
        **{"phone.Alarm": dict(updated={alarm["alarm_id"]: dict(time=time)})})


def alarm_count(person: dict, rng: random.Random) -> Draft:
    hour = rng.choice(("08:00", "10:00", "12:00", "15:00", "18:00", "20:00"))
    side = rng.choice(("before", "after"))
    sign = "<" if side == "before" else ">"
    times = [alarm["time"] for alarm in person["alarms"]]
    answer = sum(time < hour if side == "before" else time > hour for time in times)
    return asking(
        person, "phone", f"How many alarms on my phone are set to a time {side} {hour}?",
        [f'{ALARMS}\nanswer = sum(row["time"] {sign} "{hour}" for row in alarms)'], answer)


# ------------------------------------------------------------------------------------- contacts


def found_contact(name: str) -> str:
    return (f'people = apis.phone.search_contacts(access_token=token, query="{name}")\n'
            f'print(people)\nfriend = next(row for row in people if row["first_name"] == "{name}")')


def contact_new(person: dict, rng: random.Random) -> Draft:
    other = rng.choice(person["strangers"])
    kind = rng.choice(KINDS)
    known = dict(first_name=other["first_name"], last_name=other["last_name"],
                 phone_number=other["phone_number"], email=other["email"], relationships=[kind])
    given = ", ".join(f"{name}={value!r}" for name, value in known.items())
    return changing(
        person, "phone", f"Put {other['first_name']} {other['last_name']} into my phone's contacts "
        f"as a {kind}: phone number {other['phone_number']}, email address {other['email']}.",
        [f"print(apis.phone.add_contact(access_token=token, {given}))"],
        **{"phone.Contact": dict(added=[known])})


def contact_gone(person: dict, rng: random.Random) -> Draft:
    contact = rng.choice(person["contacts"])
    name = contact["first_name"]
    return changing(
        person, "phone", f"Delete {name} {contact['last_name']} from my phone's contacts.",
        [found_contact(name), "print(apis.phone.delete_contact(access_token=token,\n"
                              '                                contact_id=friend["contact_id"]))'],
        **{"phone.Contact": dict(removed=[contact["contact_id"]])})


def contact_number(person: dict, rng: random.Random) -> Draft:
    contact = rng.choice(person["contacts"])
    name = contact["first_name"]
    return asking(
        person, "phone", f"What is the phone number of {name} {contact['last_name']}, one of my "
        "contacts?", [f'{found_contact(name)}\nanswer = friend["phone_number"]'],
        contact["phone_number"])


def contact_count(person: dict, rng: random.Random) -> Draft:
    kind = rng.choice(KINDS)
    answer = sum(kind in contact["relationships"] for contact in person["contacts"])
    return asking(
        person, "phone", f"How many people in my phone's contacts are filed as {kind}?",
        [f'people = apis.phone.search_contacts(access_token=token, relationship="{kind}",\n'
         "                                    page_limit=20)\nprint(people)\n"
         "answer = len(people)"], answer)


def contact_text(person: dict, rng: random.Random) -> Draft:
    contact = rng.choice(person["contacts"])
    name = contact["first_name"]
    line = rng.choice(LINES).capitalize()
    return changing(
        person, "phone", f'Send {name} {contact["last_name"]} a text message: "{line}"',
        [found_contact(name), "print(apis.phone.send_text_message(access_token=token,\n"
         f'    phone_number=friend["phone_number"], message="{line}"))'],
        **{"phone.GlobalTextMessage": dict(added=[dict(message=line)]),
           "phone.UserTextMessage": {}})


# ---------------------------------------------------------------------------------------- notes


def found_note(title: str) -> str:
    return (f'notes = apis.simple_note.search_notes(access_token=token, query="{title}")\n'
            f'print(notes)\nnote = next(row for row in notes if row["title"] == "{title}")')


def read_note(title: str) -> list[str]:
    return [found_note(title), "text = apis.simple_note.show_note(access_token=token,\n"
            '                                  note_id=note["note_id"])["content"]\nprint(text)']


def note_new(person: dict, rng: random.Random) -> Draft:
    titles = {note["title"] for note in person["notes"]}
    title = rng.choice([idea for idea in IDEAS if idea not in titles])
    line = rng.choice(LINES)
    return changing(
        person, "simple_note", f'Write a note with the title "{title}" and the content "{line}".',
        [f'print(apis.simple_note.create_note(access_token=token, title="{title}",\n'
         f'                                   content="{line}"))'],
        **{"simple_note.Note": dict(added=[dict(title=title, content=line)])})


def note_more(person: dict, rng: random.Random) -> Draft:
    note = rng.choice(person["notes"])
    line = rng.choice(LINES)
    content = f"{note['content']}\n{line}"
    return changing(
        person, "simple_note",
        f'Add the line "{line}" at the end of my note "{note["title"]}".',
        [found_note(note["title"]), "print(apis.simple_note.add_content_to_note(\n"
         '    access_token=token, note_id=note["note_id"], append_or_prepend="append",\n'
         f'    added_content="{line}"))'],
        **{"simple_note.Note": dict(updated={note["note_id"]: dict(content=content)})})


def note_gone(person: dict, rng: random.Random) -> Draft:
    note = rng.choice(person["notes"])
    return changing(
        person, "simple_note", f'Throw away my note "{note["title"]}".',
        [found_note(note["title"]), "print(apis.simple_note.delete_note(access_token=token,\n"
                                    '                                   note_id=note["note_id"]))'],
        **{"simple_note.Note": dict(removed=[note["note_id"]])})


def note_read(person: dict, rng: random.Random) -> Draft:
    thing, shelf = rng.choice([*person["shelves"].items()])
    return asking(
        person, "simple_note", f'On which shelf are the {thing}, by my note "Where things are"?',
        [*read_note("Where things are"),
         f'answer = next(line.split(": shelf ")[1] for line in text.splitlines()\n'
         f'              if line.startswith("{thing}"))'], shelf)


# ------------------------------------------------------------------------------------ playlists

PLAYLISTS = "lists = apis.spotify.show_playlist_library(access_token=token, page_limit=20)\n" \
            "print(lists)"


def playlist_new(person: dict, rng: random.Random) -> Draft:
    titles = {row["title"] for row in person["playlists"]}
    title = rng.choice([mood for mood in MOODS if mood not in titles])
    public = rng.random() < 0.5
    return changing(
        person, "spotify",
        f'Make a {"public" if public else "private"} Spotify playlist called "{title}".',
        [f'print(apis.spotify.create_playlist(access_token=token, title="{title}",\n'
         f"                                   is_public={public}))"],
        **{"spotify.Playlist": dict(added=[dict(title=title, is_public=public)])})


def playlist_private(person: dict, rng: random.Random) -> Draft:
    changed = {row["playlist_id"]: dict(is_public=False) for row in person["playlists"]
               if row["is_public"]}
    word = rng.choice(("all", "every one of"))
    return changing(
        person, "spotify", f"Make {word} my public Spotify playlists private.",
        [PLAYLISTS, 'for row in lists:\n    if row["is_public"]:\n'
         "        print(apis.spotify.update_playlist(access_token=token, is_public=False,\n"
         '                                           playlist_id=row["playlist_id"]))'],
        **{"spotify.Playlist": dict(updated=changed)})


def playlist_rename(person: dict, rng: random.Random) -> Draft:
    row = rng.choice(person["playlists"])
    titles = {other["title"] for other in person["playlists"]}
    title = rng.choice([mood for mood in MOODS if mood not in titles])
    return changing(
        person, "spotify", f'Rename my Spotify playlist "{row["title"]}" to "{title}".',
        [f'{PLAYLISTS}\nold = next(row for row in lists if row["title"] == "{row["title"]}")',
         "print(apis.spotify.update_playlist(access_token=token,\n"
         f'    playlist_id=old["playlist_id"], title="{title}"))'],
        **{"spotify.Playlist": dict(updated={row["playlist_id"]: dict(title=title)})})


def playlist_count(person: dict, rng: random.Random) -> Draft:
    public = rng.random() < 0.5
    answer = sum(row["is_public"] == public for row in person["playlists"])
    return asking(
        person, "spotify",
        f"How many of my Spotify playlists are {'public' if public else 'private'}?",
        [f'{PLAYLISTS}\nanswer = sum(row["is_public"] == {public} for row in lists)'], answer)


# ------------------------------------------------------------------------------- of several apps


def number_noted(person: dict, rng: random.Random) -> Draft:
    contact = rng.choice(person["contacts"])
    name = contact["first_name"]
    title = f"Number of {name}"
    return Draft(
        f'Write a note with the title "{title}" whose content is the phone number of '
        f"{name} {contact['last_name']}, nothing else; my phone's contacts have it.",
        ["phone", "simple_note"],
        [LOOK, login("phone", person), found_contact(name), login("simple_note", person),
         f'print(apis.simple_note.create_note(access_token=token, title="{title}",\n'
         '                                   content=friend["phone_number"]))', DONE],
        {"simple_note.Note": dict(added=[dict(title=title, content=contact["phone_number"])])})


def alarm_noted(person: dict, rng: random.Random) -> Draft:
    train, time = rng.choice([*person["trains"].items()])
    return Draft(
        f'Set an alarm on my phone labelled "{train}" for the time at which the train to {train} '
        'leaves, by my note "Trains".', ["simple_note", "phone"],
        [LOOK, login("simple_note", person), *read_note("Trains"), login("phone", person),
         f'time = next(line.split(": ")[1] for line in text.splitlines()\n'
         f'            if line.startswith("{train}"))\n'
         f'print(apis.phone.create_alarm(access_token=token, time=time, label="{train}"))', DONE],
        {"phone.Alarm": dict(added=[dict(time=time, label=train, enabled=True)])})


SEEN = (alarm_new, alarm_off, alarm_count, contact_new, contact_number, contact_count, note_new,
        note_more, note_read, playlist_new, playlist_private, playlist_rename)
UNSEEN = (alarm_move, contact_gone, contact_text, note_gone, playlist_count, number_noted,
          alarm_noted)
