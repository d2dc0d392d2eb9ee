"""Tools for days and times, on ISO dates (YYYY-MM-DD) and 24-hour clocks (HH:MM)."""

from __future__ import annotations

import calendar
import datetime
import re

from codechat.tasks.toolbox.tool import ToolError, tool
from codechat.tasks.toolbox.values import choice, clock, date, integer

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = dict(
    enumerate("January February March April May June July August September October November December".split(), 1)
)


def _day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise ToolError(f"{text[:40]!r} is not a date like 2024-03-05") from error


def _minutes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,2}):(\d{2})", text, re.ASCII)
    if not match or int(match[1]) > 23 or int(match[2]) > 59:
        raise ToolError(f"{text[:40]!r} is not a time like 09:30")
    return int(match[1]) * 60 + int(match[2])


def _year(year: int) -> int:
    if not 1 <= year <= 9999:
        raise ToolError("year must be between 1 and 9999")
    return year


@tool(
    "Day of the week",
    date=date(),
    answer="{date} is a {result}.",
    asks=[
        "What weekday is {date}?",
        "Which day of the week is {date}?",
        "What day was {date}?",
        "Find the weekday of {date}.",
        "On what day does {date} fall?",
    ],
    hard=["Is {date} a Monday or some other day?", "Name the weekday for {date}."],
)
def weekday(date: str) -> str:
    return DAYS[_day(date).weekday()]


@tool(
    "Add days to a date",
    date=date(),
    days=integer(3, 900),
    answer="It is {result}.",
    asks=[
        "What is {days} days after {date}?",
        "Add {days} days to {date}.",
        "Which date is {days} days past {date}?",
        "{date} plus {days} days?",
        "Move {date} forward by {days} days.",
    ],
    hard=["Starting on {date}, where are we in {days} days?", "Count {days} days on from {date}."],
)
def add_days(date: str, days: int) -> str:
    try:
        return (_day(date) + datetime.timedelta(days=days)).isoformat()
    except OverflowError as error:
        raise ToolError("the result is outside the years 1 to 9999") from error


@tool(
    "Days between two dates",
    start=date(),
    end=date(),
    answer="There are {result} days between them.",
    asks=[
        "How many days from {start} to {end}?",
        "Days between {start} and {end}?",
        "Count days {start} to {end}.",
        "How long is it from {start} until {end}?",
        "Number of days from {start} to {end}?",
    ],
    hard=["How far apart are {start} and {end}?", "From {start}, how many days until {end}?"],
)
def days_between(start: str, end: str) -> int:
    return (_day(end) - _day(start)).days


@tool(
    "Check for a leap year",
    year=integer(1600, 2400),
    answer="Is {year} a leap year? {result}.",
    asks=[
        "Is {year} a leap year?",
        "Was {year} a leap year?",
        "Check if {year} is a leap year.",
        "Does {year} have a leap day?",
        "Leap year or not: {year}?",
    ],
    hard=["Does February have 29 days in {year}?", "Has the year {year} 366 days?"],
)
def is_leap_year(year: int) -> bool:
    return calendar.isleap(_year(year))


@tool(
    "Number of the day in year",
    date=date(),
    answer="It is day {result} of the year.",
    asks=[
        "Which day of the year is {date}?",
        "What is the day number of {date}?",
        "Day of the year for {date}?",
        "Count the day number of {date}.",
        "Tell me the day of the year of {date}.",
    ],
    hard=["How many days into its year is {date}?"],
)
def day_of_year(date: str) -> int:
    return _day(date).timetuple().tm_yday


@tool(
    "ISO week of a date",
    date=date(),
    answer="It is in week {result}.",
    held_out=True,
    asks=[
        "Which week is {date} in?",
        "What is the week number of {date}?",
        "Week of {date}?",
        "Find the week for {date}.",
        "In which calendar week is {date}?",
    ],
    hard=["Tell me the ISO week that holds {date}."],
)
def week_number(date: str) -> int:
    return _day(date).isocalendar().week


@tool(
    "Days in a month",
    month=choice(MONTHS),
    year=integer(1600, 2400),
    answer="It has {result} days.",
    asks=[
        "How many days has {month} {year}?",
        "How long is {month} {year}?",
        "Days in {month} {year}?",
        "How many days are in {month} of {year}?",
        "Length of {month} {year}?",
    ],
    hard=["What is the last day number of {month} in {year}?", "Count the days of {month} {year}."],
)
def month_days(month: int, year: int) -> int:
    return calendar.monthrange(_year(year), month)[1]


@tool(
    "Time in twelve hours",
    time=clock(),
    answer="It is {result}.",
    asks=[
        "Write {time} with am or pm.",
        "What is {time} on a 12-hour clock?",
        "{time} in 12-hour time?",
        "Convert {time} to am or pm.",
        "Say {time} as a 12-hour time.",
    ],
    hard=["Is {time} am or pm, and what hour?", "Turn {time} into twelve-hour form."],
)
def twelve_hour(time: str) -> str:
    hour, minute = divmod(_minutes(time), 60)
    return f"{(hour - 1) % 12 + 1}:{minute:02d} {'am' if hour < 12 else 'pm'}"


@tool(
    "Add minutes to a time",
    time=clock(),
    minutes=integer(3, 900),
    answer="It will be {result}.",
    asks=[
        "What time is {minutes} minutes after {time}?",
        "Add {minutes} minutes to {time}.",
        "{time} plus {minutes} minutes?",
        "Start {time}, length {minutes} minutes: when does it end?",
        "A film starts at {time} and takes {minutes} minutes. When is it over?",
    ],
    hard=["I leave at {time} and need {minutes} minutes. When do I arrive?", "Shift {time} by {minutes} minutes."],
)
def add_minutes(time: str, minutes: int) -> str:
    hour, minute = divmod((_minutes(time) + minutes) % 1440, 60)
    return f"{hour:02d}:{minute:02d}"


@tool(
    "Minutes between two times",
    start=clock(),
    end=clock(),
    answer="It takes {result} minutes.",
    asks=[
        "How many minutes from {start} to {end}?",
        "Minutes between {start} and {end}?",
        "How long is {start} to {end}?",
        "A meeting runs {start} to {end}. How long is it?",
        "Time from {start} until {end}?",
    ],
    hard=["Between {start} and {end}, how many minutes pass?", "The train leaves {start}, arrives {end}. How long?"],
)
def minutes_between(start: str, end: str) -> int:
    return (_minutes(end) - _minutes(start)) % 1440


@tool(
    "Age in a given year",
    born=integer(1900, 1999),
    year=integer(2000, 2099),
    answer="About {result} years.",
    asks=[
        "How old in {year} is someone born in {born}?",
        "Born in {born}, what age in {year}?",
        "Age in {year} if born in {born}?",
        "Someone was born in {born}. How old in {year}?",
        "Birth year {born}: age in {year}?",
    ],
    hard=["I was born in {born}. What age do I reach in {year}?"],
)
def age_in(born: int, year: int) -> int:
    if year < born:
        raise ToolError("year must not be before born")
    return year - born
