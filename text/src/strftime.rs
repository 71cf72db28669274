//! `strftime` for chat templates that print today's date. The time is UTC, so that replies do not depend on
//! the server's time zone. Days are converted to dates by the algorithm of Howard Hinnant, "chrono-compatible
//! low-level date algorithms".

use std::fmt::Write as _;
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

/// Formats `now` in UTC with the directives of `format`. An unknown directive is copied unchanged.
pub fn strftime(format: &str, now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64);
    let date = CivilDate::new(seconds);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let no_padding = directive == Some('-'); // `%-d` formats the number without leading zeros.
        if no_padding {
            directive = chars.next();
        }
        let Some(directive) = directive else {
            out.push_str(if no_padding { "%-" } else { "%" });
            break;
        };
        if !date.write(directive, no_padding, &mut out) {
            out.push_str(if no_padding { "%-" } else { "%" });
            out.push(directive);
        }
    }
    out
}

struct CivilDate {
    year: i64,
    /// Month, from 1.
    month: usize,
    /// Day of the month, from 1.
    day: i64,
    /// Day of the year, from 1.
    year_day: i64,
    /// Day of the week, 0 = Sunday.
    week_day: usize,
    second: i64,
}

impl CivilDate {
    fn new(seconds: i64) -> Self {
        let days = seconds.div_euclid(86_400);
        let YearMonthDay { year, month, day } = year_month_day(days);
        let new_year = YearMonthDay { year, month: 1, day: 1 };
        let first = (0..366).find(|days_back| year_month_day(days - days_back) == new_year);
        Self {
            year,
            month,
            day,
            year_day: first.unwrap_or(0) + 1,
            week_day: (days + 4).rem_euclid(7) as usize, // 1970-01-01 was a Thursday.
            second: seconds.rem_euclid(86_400),
        }
    }

    /// Appends the value of a directive; returns whether the directive is known.
    fn write(&self, directive: char, no_padding: bool, out: &mut String) -> bool {
        let (hour, minute) = (self.second / 3600, self.second / 60 % 60);
        let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
        let (number, width) = match directive {
            'd' => (self.day, 2),
            'm' => (self.month as i64, 2),
            'y' => (self.year.rem_euclid(100), 2),
            'Y' => (self.year, 4),
            'H' => (hour, 2),
            'I' => (hour12, 2),
            'M' => (minute, 2),
            'S' => (self.second % 60, 2),
            'j' => (self.year_day, 3),
            'w' => (self.week_day as i64, 1),
            _ => return self.write_text(directive, out),
        };
        let width = if no_padding { 1 } else { width };
        let _infallible = write!(out, "{number:0width$}");
        true
    }

    fn write_text(&self, directive: char, out: &mut String) -> bool {
        let (month, day) = (MONTHS[self.month - 1], DAYS[self.week_day]);
        match directive {
            'B' => out.push_str(month),
            'b' | 'h' => out.push_str(&month[..3]),
            'A' => out.push_str(day),
            'a' => out.push_str(&day[..3]),
            'p' => out.push_str(if self.second < 43_200 { "AM" } else { "PM" }),
            'Z' => out.push_str("UTC"),
            'z' => out.push_str("+0000"),
            '%' => out.push('%'),
            'F' => return self.expand(&[('Y', '-'), ('m', '-'), ('d', ' ')], out),
            'T' => return self.expand(&[('H', ':'), ('M', ':'), ('S', ' ')], out),
            _ => return false,
        }
        true
    }

    /// Appends the values of several directives; `parts` gives each directive with the separator that follows
    /// it. The last separator is not written.
    fn expand(&self, parts: &[(char, char)], out: &mut String) -> bool {
        for (index, &(directive, separator)) in parts.iter().enumerate() {
            self.write(directive, false, out);
            if index + 1 < parts.len() {
                out.push(separator);
            }
        }
        true
    }
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
    }
}
