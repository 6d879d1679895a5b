//! Times in RFC 3339, as Twitch and Box sign them.

const DAY: i64 = 86_400;

/// Returns the seconds since 1970 of a time such as `2026-11-22T06:00:00.123Z`; `None` if it is
/// malformed. A fraction of a second is dropped.
pub(super) fn parse(text: &str) -> Option<i64> {
    if !text.is_ascii() {
        return None;
    }
    let (date_time, rest) = text.split_at_checked(19)?;
    let number = |from: usize, len: usize| digits(date_time.get(from..from + len)?);
    let separators = [(4, '-'), (7, '-'), (10, 'T'), (13, ':'), (16, ':')];
    if separators.iter().any(|&(at, sign)| !date_time[at..].starts_with(sign)) {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 2)?, number(8, 2)?);
    let (hour, minute, second) = (number(11, 2)?, number(14, 2)?, number(17, 2)?);
    let in_range = (1..=12).contains(&month)
        && (1..=days_in(year, month)).contains(&day)
        && hour < 24
        && minute < 60
        // A leap second.
        && second <= 60;
    let offset = offset(fraction(rest)?)?;
    in_range.then(|| {
        days_since_1970(year, month, day) * DAY + hour * 3_600 + minute * 60 + second - offset
    })
}

fn digits(text: &str) -> Option<i64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// Returns the text after the fraction of a second.
fn fraction(text: &str) -> Option<&str> {
    let Some(fraction) = text.strip_prefix('.') else { return Some(text) };
    let rest = fraction.trim_start_matches(|digit: char| digit.is_ascii_digit());
    (rest.len() < fraction.len()).then_some(rest)
}

/// Returns the offset from UTC in seconds.
fn offset(text: &str) -> Option<i64> {
    if text == "Z" {
        return Some(0);
    }
    let [sign @ (b'+' | b'-'), _, _, b':', _, _] = text.as_bytes() else { return None };
    let sign = if *sign == b'+' { 1 } else { -1 };
    let (hours, minutes) = (digits(&text[1..3])?, digits(&text[4..])?);
    (hours < 24 && minutes < 60).then_some(sign * (hours * 3_600 + minutes * 60))
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_in(year: i64, month: i64) -> i64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    // 719,162 days lie between 0001-01-01 and 1970-01-01.
    let before = year - 1;
    let of_years =
        before * 365 + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400);
    let of_months: i64 = (1..month).map(|month| days_in(year, month)).sum();
    of_years + of_months + day - 1 - 719_162
}

/// Writes the time, which must not be before 1970.
pub(super) fn format(seconds: i64) -> String {
    let (mut days, second) = (seconds.div_euclid(DAY), seconds.rem_euclid(DAY));
    let (mut year, mut month) = (1970, 1);
    while days >= 365 + i64::from(is_leap(year)) {
        days -= 365 + i64::from(is_leap(year));
        year += 1;
    }
    while days >= days_in(year, month) {
        days -= days_in(year, month);
        month += 1;
    }
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", days + 1)
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;

    use super::{format, parse};

    #[test]
    fn times_are_read_as_chrono_reads_them() {
        let times = [
            "1970-01-01T00:00:00Z",
            "1969-12-31T23:59:59Z",
            "0001-01-01T00:00:00Z",
            "2000-02-29T12:00:00.5Z",
            "1900-03-01T00:00:00+00:00",
            "2020-01-01T00:00:00-07:00",
            "2022-12-28T14:31:01.123456789Z",
            "2024-12-31T23:59:59+05:30",
            "9999-12-31T23:59:59Z",
        ];
        for time in times {
            let expected = DateTime::parse_from_rfc3339(time).unwrap().timestamp();
            assert_eq!(parse(time), Some(expected), "{time}");
        }
        for seconds in (0..4_102_444_800).step_by(1_234_567) {
            let time = format(seconds);
            let expected = DateTime::parse_from_rfc3339(&time).unwrap().timestamp();
            assert_eq!((expected, parse(&time)), (seconds, Some(seconds)), "{time}");
        }
    }

    #[test]
    fn malformed_times_are_refused() {
        for time in [
            "",
            "2022",
            "2022-12-28T14:31:01",
            "2022-12-28 14:31:01Z",
            "2022-13-28T14:31:01Z",
            "2022-00-28T14:31:01Z",
            "2022-02-29T14:31:01Z",
            "2022-12-00T14:31:01Z",
            "2022-12-28T24:31:01Z",
            "2022-12-28T14:60:01Z",
            "2022-12-28T14:31:61Z",
            "2022-12-28T14:31:01.Z",
            "2022-12-28T14:31:01ZZ",
            "2022-12-28T14:31:01+7:00",
            "2022-12-28T14:31:01+07:60",
            "2022-12-28T14:31:01\u{e9}",
            "+022-12-28T14:31:01Z",
            "2022-12-28T1\u{e9}:31:01Z",
        ] {
            assert_eq!(parse(time), None, "{time}");
        }
    }
}
