//! `strftime` for chat templates that print today's date. The time is UTC, so replies do not depend on the
//! server's time zone. Days are converted to dates by the algorithm of Howard Hinnant, "chrono-compatible
//! low-level date algorithms".

use std::iter::Peekable;
use std::str::Chars;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Maximum field width in a directive.
const WIDTH_MAX: usize = 1_000;

/// Formats `now` in UTC as Python's `datetime.strftime` does on Linux. The `datetime` is naive (has no time
/// zone), so `%z` and `%Z` are empty. An unknown directive is copied unchanged.
pub fn strftime(format: &str, now: SystemTime) -> String {
    let elapsed = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let date = UtcDateTime::new(elapsed.as_secs() as i64, elapsed.subsec_micros());
    let mut out = String::new();
    date.write_format(format, &mut out);
    out
}

/// Date and time in UTC, as calendar fields.
struct UtcDateTime {
    year: i64,
    /// Month, from 1.
    month: usize,
    /// Day of the month, from 1.
    day: i64,
    /// Day of the year, from 1.
    year_day: i64,
    /// Day of the week, 0 = Sunday.
    week_day: i64,
    /// Second of the day.
    second: i64,
    microsecond: u32,
    /// Seconds since 1970.
    timestamp: i64,
}

/// Flags and width between `%` and a directive.
#[derive(Default)]
struct DirectiveOptions {
    /// `-`, `_` or `0`: how a number is padded.
    padding: Option<char>,
    /// `^`: upper case.
    is_upper: bool,
    width: Option<usize>,
}

/// Value of a directive.
enum DirectiveValue {
    /// Number with its minimum width in characters and its fill character.
    Number(i64, usize, char),
    Text(String),
}

impl UtcDateTime {
    fn new(seconds: i64, microsecond: u32) -> Self {
        let days = seconds.div_euclid(86_400);
        let YearMonthDay { year, month, day } = year_month_day(days);
        let new_year = YearMonthDay { year, month: 1, day: 1 };
        let first = (0..366).find(|days_back| year_month_day(days - days_back) == new_year);
        Self {
            year,
            month,
            day,
            year_day: first.unwrap_or(0) + 1,
            week_day: (days + 4).rem_euclid(7), // 1970-01-01 was a Thursday.
            second: seconds.rem_euclid(86_400),
            microsecond,
            timestamp: seconds,
        }
    }

    fn write_format(&self, format: &str, out: &mut String) {
        let mut rest = format;
        while let Some(at) = rest.find('%') {
            out.push_str(&rest[..at]);
            let directive = &rest[at..];
            let mut chars = directive[1..].chars().peekable();
            let options = DirectiveOptions::parse(&mut chars);
            let _ = chars.next_if(|c| matches!(c, 'E' | 'O'));
            let value = chars.peek().and_then(|c| self.value(*c));
            let length = directive.len() - chars.map(char::len_utf8).sum::<usize>();
            if let Some(value) = value {
                options.write(&value, out);
                rest = &directive[length + 1..]; // A directive is one byte long.
            } else {
                out.push_str(&directive[..length]);
                rest = &directive[length..];
            }
        }
        out.push_str(rest);
    }

    /// Value of a directive; `None` if it is unknown.
    fn value(&self, directive: char) -> Option<DirectiveValue> {
        let number = self.date_number(directive).or_else(|| self.time_number(directive));
        number.or_else(|| self.text(directive).map(DirectiveValue::Text))
    }

    /// Value of a directive for a number in the date; `None` for other directives.
    fn date_number(&self, directive: char) -> Option<DirectiveValue> {
        let monday_based = (self.week_day + 6) % 7;
        Some(match directive {
            'd' => zero_padded(self.day, 2),
            'e' => DirectiveValue::Number(self.day, 2, ' '),
            'm' => zero_padded(self.month as i64, 2),
            'y' => zero_padded(self.year.rem_euclid(100), 2),
            'C' => zero_padded(self.year.div_euclid(100), 2),
            'Y' => zero_padded(self.year, 1),
            'j' => zero_padded(self.year_day, 3),
            'w' => zero_padded(self.week_day, 1),
            'u' => zero_padded(monday_based + 1, 1),
            'U' => zero_padded((self.year_day + 6 - self.week_day) / 7, 2),
            'W' => zero_padded((self.year_day + 6 - monday_based) / 7, 2),
            'V' => zero_padded(self.iso_week().week, 2),
            'G' => zero_padded(self.iso_week().year, 1),
            'g' => zero_padded(self.iso_week().year.rem_euclid(100), 2),
            _ => return None,
        })
    }

    /// Value of a directive for a number in the time; `None` for other directives.
    fn time_number(&self, directive: char) -> Option<DirectiveValue> {
        let (hour, minute) = (self.second / 3600, self.second / 60 % 60);
        let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
        Some(match directive {
            'H' => zero_padded(hour, 2),
            'I' => zero_padded(hour12, 2),
            'k' => DirectiveValue::Number(hour, 2, ' '),
            'l' => DirectiveValue::Number(hour12, 2, ' '),
            'M' => zero_padded(minute, 2),
            'S' => zero_padded(self.second % 60, 2),
            'f' => zero_padded(i64::from(self.microsecond), 6),
            's' => zero_padded(self.timestamp, 1),
            _ => return None,
        })
    }

    fn text(&self, directive: char) -> Option<String> {
        let (month, day) = (MONTHS[self.month - 1], DAYS[self.week_day as usize]);
        let half = if self.second < 43_200 { "AM" } else { "PM" };
        let format = match directive {
            'B' => return Some(month.to_owned()),
            'b' | 'h' => return Some(month[..3].to_owned()),
            'A' => return Some(day.to_owned()),
            'a' => return Some(day[..3].to_owned()),
            'p' => return Some(half.to_owned()),
            'P' => return Some(half.to_lowercase()),
            'Z' | 'z' => return Some(String::new()),
            '%' => return Some("%".to_owned()),
            'n' => return Some("\n".to_owned()),
            't' => return Some("\t".to_owned()),
            'F' => "%Y-%m-%d",
            'T' | 'X' => "%H:%M:%S",
            'D' | 'x' => "%m/%d/%y",
            'R' => "%H:%M",
            'r' => "%I:%M:%S %p",
            'c' => "%a %b %e %H:%M:%S %Y",
            _ => return None,
        };
        let mut text = String::new();
        self.write_format(format, &mut text);
        Some(text)
    }

    /// ISO 8601 week: weeks begin on Monday, and week 1 contains the first Thursday of the year.
    fn iso_week(&self) -> IsoWeek {
        let monday_based = (self.week_day + 6) % 7;
        // An ISO week belongs to the year of its Thursday.
        let thursday = year_month_day(self.timestamp.div_euclid(86_400) - monday_based + 3);
        let thursday_day = self.year_day - monday_based + 3;
        let day_of_year = match thursday.year - self.year {
            0 => thursday_day,
            1 => thursday.day,
            _ => thursday_day + if is_leap(thursday.year) { 366 } else { 365 },
        };
        IsoWeek { year: thursday.year, week: (day_of_year - 1) / 7 + 1 }
    }
}

impl DirectiveOptions {
    /// Parses the flags and the width at the start of `chars`.
    fn parse(chars: &mut Peekable<Chars<'_>>) -> Self {
        let mut options = Self::default();
        while let Some(flag) = chars.next_if(|c| matches!(c, '-' | '_' | '0' | '^' | '#')) {
            match flag {
                '^' | '#' => options.is_upper = true,
                padding => options.padding = Some(padding),
            }
        }
        while let Some(digit) = chars.next_if(char::is_ascii_digit).and_then(|c| c.to_digit(10)) {
            let width = options.width.unwrap_or(0) * 10 + digit as usize;
            options.width = Some(width.min(WIDTH_MAX));
        }
        options
    }

    fn write(&self, value: &DirectiveValue, out: &mut String) {
        let text = match value {
            DirectiveValue::Text(text) => {
                let text = if self.is_upper { text.to_uppercase() } else { text.clone() };
                let fill = if self.padding == Some('0') { '0' } else { ' ' };
                let missing = self.width.unwrap_or(0).saturating_sub(text.len());
                out.extend(std::iter::repeat_n(fill, missing));
                text
            }
            DirectiveValue::Number(number, width, fill) => {
                let text = number.to_string();
                let (width, fill) = match self.padding {
                    Some('-') => (0, *fill),
                    Some('_') => (self.width.unwrap_or(*width), ' '),
                    Some(_) => (self.width.unwrap_or(*width), '0'),
                    None => (self.width.unwrap_or(*width), *fill),
                };
                out.extend(std::iter::repeat_n(fill, width.saturating_sub(text.len())));
                text
            }
        };
        out.push_str(&text);
    }
}

/// Value of a directive that pads `number` with zeros to `width` characters.
fn zero_padded(number: i64, width: usize) -> DirectiveValue {
    DirectiveValue::Number(number, width, '0')
}

/// Year and week of ISO 8601.
struct IsoWeek {
    year: i64,
    week: i64,
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

/// Date of the proleptic Gregorian calendar; months and days are counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct YearMonthDay {
    year: i64,
    month: usize,
    day: i64,
}

/// Converts days since 1970-01-01 to a date.
fn year_month_day(days: i64) -> YearMonthDay {
    let shifted = days + 719_468; // Days since 0000-03-01.
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted_month = (5 * of_year + 2) / 153; // Month counted from March.
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    YearMonthDay { year, month: month as usize, day }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64, format: &str) -> String {
        strftime(format, UNIX_EPOCH + Duration::from_secs(seconds))
    }

    #[test]
    fn dates_match_the_calendar() {
        assert_eq!(at(0, "%A %d %B %Y %j"), "Thursday 01 January 1970 001");
        assert_eq!(at(951_782_400, "%d %b %Y, %a, %-d/%-m/%y"), "29 Feb 2000, Tue, 29/2/00");
        assert_eq!(at(1_735_689_599, "%F %T %I:%M %p %j"), "2024-12-31 23:59:59 11:59 PM 366");
        assert_eq!(at(0, "100%% %Q %-"), "100% %Q %-");
        assert_eq!(
            at(1_732_147_200, "%U %W %V %G %u %e %c|%Z%z|%D"),
            "46 47 47 2024 4 21 Thu Nov 21 00:00:00 2024||11/21/24"
        );
        assert_eq!(at(1_735_603_200, "%G-W%V %g %^a %_m %5d"), "2025-W01 25 TUE 12 00031");
        assert_eq!(at(1_609_459_200, "%G-W%V %U %W %-I %l %k %P"), "2020-W53 00 00 12 12  0 am");
    }
}
