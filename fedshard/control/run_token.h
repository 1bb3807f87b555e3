// The secret of one run: whoever knows it may speak to the run's coordinator, nobody else.
// The surprising part: it holds the secret keys of both ends, so that one string in the environment is enough for the
// launcher and for every rank; the public keys follow from the secret ones.
#pragma once
#include <string>
#include <string_view>

namespace fedshard::control {

// CURVE keys in Z85 (40 characters each). Never logged.
class RunToken {
 public:
  static RunToken random();
  // Throws UsageError (without repeating the text) where it is no run token.
  static RunToken parse(std::string_view text);

  std::string format() const { return server_secret_ + client_secret_; }
  const std::string& server_secret() const { return server_secret_; }
  const std::string& server_public() const { return server_public_; }
  const std::string& client_secret() const { return client_secret_; }
  const std::string& client_public() const { return client_public_; }

 private:
  RunToken(std::string server_secret, std::string client_secret);

  std::string server_secret_, server_public_, client_secret_, client_public_;
};

}  // namespace fedshard::control
