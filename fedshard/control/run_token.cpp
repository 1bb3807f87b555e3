#include "fedshard/control/run_token.h"

#include <zmq.h>

#include <array>
#include <cstddef>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::control {
namespace {

constexpr std::size_t kKeyChars = 40;
using KeyText = std::array<char, kKeyChars + 1>;

std::string random_secret() {
  KeyText public_key{}, secret_key{};
  if (zmq_curve_keypair(public_key.data(), secret_key.data()) != 0) {
    base::fail<base::RunError>("cannot make the run's keys: {} (libzmq must be built with CURVE)",
                               zmq_strerror(zmq_errno()));
  }
  return {secret_key.data(), kKeyChars};
}

std::string public_of(const std::string& secret) {
  KeyText public_key{};
  if (zmq_curve_public(public_key.data(), secret.c_str()) != 0) {
    base::fail<base::UsageError>(
        "the run token (FEDSHARD_RUN_TOKEN) is not valid: it must be the one that the launcher made for this run");
  }
  return {public_key.data(), kKeyChars};
}

}  // namespace

RunToken::RunToken(std::string server_secret, std::string client_secret)
    : server_secret_(std::move(server_secret)),
      server_public_(public_of(server_secret_)),
      client_secret_(std::move(client_secret)),
      client_public_(public_of(client_secret_)) {}

RunToken RunToken::random() { return {random_secret(), random_secret()}; }

RunToken RunToken::parse(std::string_view text) {
  if (text.size() != 2 * kKeyChars) {
    base::fail<base::UsageError>("the run token (FEDSHARD_RUN_TOKEN) has {} characters, not {}: it is not whole",
                                 text.size(), 2 * kKeyChars);
  }
  return {std::string(text.substr(0, kKeyChars)), std::string(text.substr(kKeyChars))};
}

}  // namespace fedshard::control
