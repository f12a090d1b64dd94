//! Whether a connection to one host may go on, by the host that its first bytes name.

use std::io;
use std::sync::Arc;

use super::{Sniffed, Sniffer, Watch, Watched};
use crate::audit::About;
use crate::decide::{Finding, Protocol, Subject};
use crate::host::{Host, HostKind};
use crate::policy::Pass;
use crate::proxy::{Client, Shared};

/// A connection that passed, and the host it was judged for.
pub(crate) struct Check {
    pub shared: Arc<Shared>,
    pub protocol: Protocol,
    pub host: Host,
    pub port: u16,
    pub method: Option<&'static str>,
    pub client: Client,
}

impl Check {
    pub(crate) fn sniffer(&self) -> Sniffer {
        Sniffer::new(self.shared.limits.http_buffer)
    }

    /// Whether the host that the first bytes name may be talked to over this connection. The pass, if
    /// there is one, is held until the connection ends.
    pub(crate) async fn judge(&self, sniffed: Sniffed) -> io::Result<Option<Pass>> {
        let named = match sniffed {
            Sniffed::Opaque | Sniffed::Named(None) => return Ok(None),
            Sniffed::Named(Some(named)) if named == self.host => return Ok(None),
            Sniffed::Named(Some(named)) => named,
            Sniffed::Invalid => return Err(self.refuse(&self.host)),
        };
        if !matches!(self.host.kind(), HostKind::Address(_)) {
            return Err(self.refuse(&named));
        }
        // The program looked the name up elsewhere, or knows the address: both have to be allowed.
        let (protocol, port, method) = (self.protocol, self.port, self.method);
        let subject = Subject { protocol, host: &named, port, method, opened: false };
        let (address, cut) = (self.client.address(), self.client.cut());
        let judged = self.shared.judge.judge(subject, address, cut).await;
        let (_, pass) = judged.map_err(|_| io::Error::from(io::ErrorKind::PermissionDenied))?;
        Ok(Some(pass))
    }

    /// Whether these bytes may follow opaque ones.
    pub(crate) fn watch(&self, watch: &mut Watch, bytes: &[u8]) -> io::Result<Watched> {
        match watch.push(bytes) {
            Watched::Request => Err(self.refuse(&self.host)),
            passes => Ok(passes),
        }
    }

    /// Reports a connection that is to be cut.
    fn refuse(&self, host: &Host) -> io::Error {
        let about = About {
            protocol: self.protocol,
            host: Some(host),
            port: self.port,
            method: self.method,
            client: self.client.address(),
        };
        self.shared.judge.report(&Finding::host_mismatch(), &about);
        io::ErrorKind::PermissionDenied.into()
    }
}
