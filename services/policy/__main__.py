"""`python -m services.policy`"""

from paceline.service import main
from services.policy.policy import body

if __name__ == "__main__":
    main("policy", body)
