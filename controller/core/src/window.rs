//! Times of the week, in UTC, in which idle containers may be offloaded although no other container
//! needs their VRAM.
//!
//! ```text
//! offload_window = "mon-fri 20:00-07:00, sat-sun 00:00-24:00"
//! ```
//!
//! If the end of a span is not after its begin, the span continues on the next day. Outside its
//! window, a container stays resident until a waiter needs its VRAM.

use std::{fmt, str::FromStr};

use super::policy::InvalidValue;

const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
const DAY: u32 = 24 * 60;
/// Maximum number of spans of a window. The number is limited because containers write annotations,
/// which are not trusted.
const MAX_SPANS: usize = 16;

/// An offload window: the times of the week in which an idle container may be offloaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// The time spans of the window. A window without spans is always open.
    spans: Vec<Span>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    /// First and last day of the span. 0 is Monday.
    days: (u32, u32),
    /// Begin of the span (`from`) and end of the span (`to`), in minutes since midnight. If the end
    /// is not after the begin, the span ends on the next day.
    from: u32,
    to: u32,
}

impl Window {
    /// Whether the window is open at a minute of the week. Minute 0 is Monday 00:00.
    #[must_use]
    pub fn is_open(&self, minute: u32) -> bool {
        let (day, minute) = (minute / DAY % 7, minute % DAY);
        let on = |span: &Span, day: u32| match span.days {
            (first, last) if first <= last => (first..=last).contains(&day),
            (first, last) => day >= first || day <= last,
        };
        self.spans.is_empty()
            || self.spans.iter().any(|span| {
                let overnight = span.to <= span.from;
                let today = minute >= span.from && (overnight || minute < span.to);
                let since_yesterday = overnight && minute < span.to;
                on(span, day) && today || on(span, (day + 6) % 7) && since_yesterday
            })
    }
}

/// Converts milliseconds since 1970 to the minute of the week. 1970 began on a Thursday.
#[must_use]
pub fn week_minute(unix_ms: i64) -> u32 {
    let minutes = unix_ms.div_euclid(60_000) + 3 * i64::from(DAY);
    u32::try_from(minutes.rem_euclid(7 * i64::from(DAY))).unwrap_or(0)
}

impl FromStr for Window {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Window, InvalidValue> {
        if text.trim() == "always" {
            return Ok(Window::default());
        }
        let spans: Option<Vec<Span>> = text.split(',').take(MAX_SPANS + 1).map(span).collect();
        let accepted = InvalidValue::Form(
            "always, or times of the week in UTC such as \"mon-fri 20:00-07:00, sun 00:00-24:00\"",
        );
        spans.filter(|spans| spans.len() <= MAX_SPANS).map(|spans| Window { spans }).ok_or(accepted)
    }
}

fn span(text: &str) -> Option<Span> {
    let (days, hours) = text.trim().split_once(' ')?;
    let day = |text: &str| DAYS.iter().position(|day| *day == text).map(|day| day as u32);
    let (first, last) = days.split_once('-').unwrap_or((days, days));
    let (from, to) = hours.trim().split_once('-')?;
    let (from, to) = (time(from)?, time(to)?);
    (from < DAY).then_some(Span { days: (day(first)?, day(last)?), from, to })
}

fn time(text: &str) -> Option<u32> {
    let (hour, minute) = text.split_once(':')?;
    if hour.len() != 2 || minute.len() != 2 {
        return None;
    }
    let (hour, minute): (u32, u32) = (hour.parse().ok()?, minute.parse().ok()?);
    let minutes = hour * 60 + minute;
    (minute < 60 && minutes <= DAY).then_some(minutes)
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.spans.is_empty() {
            return f.write_str("always");
        }
        for (n, Span { days: (first, last), from, to }) in self.spans.iter().enumerate() {
            let comma = if n > 0 { ", " } else { "" };
            write!(f, "{comma}{}", DAYS[*first as usize])?;
            if last != first {
                write!(f, "-{}", DAYS[*last as usize])?;
            }
            let (h, m) = (from / 60, from % 60);
            write!(f, " {h:02}:{m:02}-{:02}:{:02}", to / 60, to % 60)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn at(day: u32, hour: u32) -> u32 {
        day * DAY + hour * 60
    }

    #[test]
    fn night_span_continues_into_next_day() {
        let nights: Window = "mon-fri 20:00-07:00".parse().unwrap();
        for (day, hour, open) in [
            (0, 6, false), // Sunday night is not in the span.
            (0, 19, false),
            (0, 21, true),
            (1, 6, true),
            (1, 7, false),
            (5, 6, true), // Friday night ends on Saturday.
            (5, 21, false),
        ] {
            assert_eq!(nights.is_open(at(day, hour)), open, "{day} {hour}");
        }
    }

    #[test]
    fn week_begins_on_monday() {
        // 5 January 1970 was a Monday.
        assert_eq!(week_minute(4 * 86_400_000), 0);
        assert_eq!(week_minute(0), at(3, 0));
        let weekend: Window = "sat-mon 00:00-24:00".parse().unwrap();
        assert!(weekend.is_open(at(6, 12)) && weekend.is_open(at(0, 12)));
        assert!(!weekend.is_open(at(1, 12)));
    }

    #[test]
    fn invalid_window_names_accepted_form() {
        for bad in
            ["", "nights", "mon 8-17", "mon 24:00-25:00", "mon 08:60-09:00", "die 08:00-09:00"]
        {
            assert!(bad.parse::<Window>().unwrap_err().to_string().contains("accepted"), "{bad}");
        }
        assert!("mon 08:00-09:00,".repeat(99).parse::<Window>().is_err());
        assert!("always".parse::<Window>().unwrap().is_open(0));
    }

    proptest! {
        /// The text of a window parses to the same window.
        #[test]
        fn shown_window_parses_back(
            spans in proptest::collection::vec((0_u32..7, 0_u32..7, 0_u32..1440, 0_u32..1441), 1..5),
            minute in 0_u32..10_080,
        ) {
            let spans = spans.into_iter().map(|(a, b, from, to)| Span { days: (a, b), from, to });
            let window = Window { spans: spans.collect() };
            let read: Window = window.to_string().parse().unwrap();
            prop_assert_eq!(read.is_open(minute), window.is_open(minute));
            prop_assert_eq!(read, window);
        }
    }
}
