//! HTTP requests that the server makes for a client.

use serde::{Deserialize, Serialize};

use crate::base64_bytes::Base64Bytes;

/// Params of `http/request`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpRequestParams {
    /// `GET`, `POST`, …
    pub method: String,
    /// http or https.
    pub url: String,
    /// In order, repeats allowed.
    #[serde(default)]
    pub headers: Vec<HttpHeader>,
    /// The request's body.
    #[serde(default, rename = "bodyBase64", skip_serializing_if = "Option::is_none")]
    pub body: Option<Base64Bytes>,
    /// For the whole exchange, a streamed body included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// What to do with 3xx.
    #[serde(default)]
    pub redirect_policy: HttpRedirectPolicy,
    /// Names the body's notifications.
    pub request_id: String,
    /// Answer after the headers, send the body as notifications.
    #[serde(default)]
    pub stream_response: bool,
}

/// Shows the method only: URLs and headers carry credentials.
impl std::fmt::Debug for HttpRequestParams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpRequestParams").field("method", &self.method).finish_non_exhaustive()
    }
}

/// What to do with a redirect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HttpRedirectPolicy {
    /// Go there.
    #[default]
    Follow,
    /// Return it.
    Stop,
}

/// A header.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpHeader {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// A variable of the server whose value is appended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_env_var: Option<String>,
}

/// Shows the name only.
impl std::fmt::Debug for HttpHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpHeader").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Result of `http/request`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpRequestResponse {
    /// 200, 404, …
    pub status: u16,
    /// In order.
    pub headers: Vec<HttpHeader>,
    /// The whole body; empty if it is streamed.
    #[serde(rename = "bodyBase64")]
    pub body: Base64Bytes,
}

/// Params of the notification `http/request/bodyDelta`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpRequestBodyDeltaNotification {
    /// Of which request.
    pub request_id: String,
    /// From 1.
    pub seq: u64,
    /// At most 1 MiB.
    #[serde(rename = "deltaBase64")]
    pub delta: Base64Bytes,
    /// The last one.
    pub done: bool,
    /// Why the body ended early.
    pub error: Option<String>,
}

crate::encode::by_serde! { HttpRequestParams, HttpRequestResponse, HttpRequestBodyDeltaNotification }
