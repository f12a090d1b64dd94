//! What is reported about every judged request.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::decide::{Finding, Outcome, Protocol, Reason, Scope, Source};
use crate::host::Host;

/// One record of the audit: the members of `network/policyDecision` except the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// When the request was judged.
    pub timestamp: SystemTime,
    /// About the host or about something else.
    pub scope: Scope,
    /// What was decided.
    pub decision: Outcome,
    /// Who decided.
    pub source: Source,
    /// A word of the protocol, or the controller's own.
    pub reason: String,
    /// How the request came.
    pub protocol: Protocol,
    /// In normal form; `unix-socket` for a Unix socket.
    pub host: String,
    /// 0 for a Unix socket.
    pub port: u16,
    /// The HTTP method; `None` for SOCKS5.
    pub method: Option<String>,
    /// The address of the client's socket; `None` if the connection came another way.
    pub client: Option<String>,
    /// The controller allowed what the rules did not.
    pub policy_override: bool,
}

impl Record {
    /// The timestamp as on the wire: RFC 3339 in UTC with milliseconds.
    pub fn timestamp_rfc3339(&self) -> String {
        let since = self.timestamp.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
        let (year, month, day) = civil_from_days(days);
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        let millis = since.subsec_millis();
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
    }

    pub(crate) fn new(finding: &Finding, about: &About<'_>, timestamp: SystemTime) -> Self {
        Self {
            timestamp,
            scope: finding.scope,
            decision: finding.outcome,
            source: finding.source,
            reason: finding.reason.as_ref().map_or("allow", Reason::as_str).to_owned(),
            protocol: about.protocol,
            host: about.host.map_or("unix-socket", Host::as_str).to_owned(),
            port: about.port,
            method: about.method.map(str::to_owned),
            client: about.client.map(str::to_owned),
            policy_override: finding.policy_override,
        }
    }
}

/// Year, month and day of a day counted from 1970, by years that begin in March: the day that comes and
/// goes is then the last of a year.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

/// The request that a record is about.
pub(crate) struct About<'a> {
    pub protocol: Protocol,
    /// `None`: a Unix socket.
    pub host: Option<&'a Host>,
    pub port: u16,
    pub method: Option<&'a str>,
    pub client: Option<&'a str>,
}

/// Receives the audit. Called on the proxy's tasks: it must not block.
pub trait Observer: Send + Sync {
    /// Takes one record.
    fn observe(&self, record: Record);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(millis: u64) -> String {
        let finding = Finding::unix_socket();
        let about =
            About { protocol: Protocol::Http, host: None, port: 0, method: None, client: None };
        Record::new(&finding, &about, UNIX_EPOCH + Duration::from_millis(millis))
            .timestamp_rfc3339()
    }

    #[test]
    fn timestamps_are_rfc_3339_in_milliseconds() {
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399_999), "2000-02-28T23:59:59.999Z");
        assert_eq!(at(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(951_868_800_000), "2000-03-01T00:00:00.000Z");
        assert_eq!(at(1_795_437_622_739), "2026-11-23T12:40:22.739Z");
        assert_eq!(at(4_107_542_399_001), "2100-02-28T23:59:59.001Z");
        assert_eq!(at(4_107_542_400_000), "2100-03-01T00:00:00.000Z");
    }

    /// Day by day through four centuries, against the calendar's plain rules.
    #[test]
    fn dates_follow_the_calendar() {
        let (mut year, mut month, mut day) = (1970, 1, 1);
        for days in 0..146_097 {
            assert_eq!(civil_from_days(days), (year, month, day), "{days}");
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let last = match month {
                4 | 6 | 9 | 11 => 30,
                2 => 28 + u64::from(leap),
                _ => 31,
            };
            day += 1;
            if day > last {
                (month, day) = (month + 1, 1);
            }
            if month > 12 {
                (year, month) = (year + 1, 1);
            }
        }
    }
}
